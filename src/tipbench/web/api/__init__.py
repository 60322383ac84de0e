"""The JSON API: one router per resource."""
