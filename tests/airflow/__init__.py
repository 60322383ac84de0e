"""Tests of the DAG. Not the package Airflow, which has its own environment."""
