"""Command-line interface: one module per command; `main` assembles them."""
