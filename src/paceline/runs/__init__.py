"""The files of a run: its directory, checkpoints, metrics, logs, and packages exported from it."""
