"""The admin API and its panel over HTTP. `admin.create_app` puts it together; only this folder knows FastAPI."""
