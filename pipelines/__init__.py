"""Wires data preparation and the networks into one DAG of Ray tasks, tracked with MLflow."""
