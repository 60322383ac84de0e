"""The admin API and panel over HTTP. `app.create_app` assembles them; only this package imports FastAPI."""
