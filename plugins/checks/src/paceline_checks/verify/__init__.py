"""Trains a task with every strategy, and compares the results."""
