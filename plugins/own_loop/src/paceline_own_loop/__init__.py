"""A script's own loop over the steps of a run: ``paceline.Run``."""
