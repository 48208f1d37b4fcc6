"""Measurements on a user's own machines: collectives, and how a task scales with processes."""
