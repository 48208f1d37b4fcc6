"""Removing runs, checkpoints and packages that a policy does not keep. No torch."""
