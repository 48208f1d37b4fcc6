"""Faults on purpose: a run is disturbed from outside, and held against the same run undisturbed."""
