"""Tests of deploy/: a package, so that its rules are found by one name."""
