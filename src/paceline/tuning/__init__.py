"""Searches for the hyperparameters of a task, on Ray Tune."""
