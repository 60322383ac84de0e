"""Tests of the DAG: a package, so that its fixtures are its own. Not Airflow, which is never in this environment."""
