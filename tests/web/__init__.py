"""Tests of the web application: a package, so that its own fixtures and panels are found by one name."""
