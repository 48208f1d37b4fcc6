"""Measurements of collectives on a user's own machines."""
