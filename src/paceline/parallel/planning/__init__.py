"""Predicts the memory and the time of a model under each strategy, and chooses one."""
