"""Searches over hyperparameters."""
