"""What a run keeps on disk: its directory, checkpoints, metrics, logs, and packages made from it."""
