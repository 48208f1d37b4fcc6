"""Experiment trackers that have a name of ours, and the pages of tools that compare runs."""
