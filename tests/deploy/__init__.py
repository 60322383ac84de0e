"""Tests of deploy/, and their helpers."""
