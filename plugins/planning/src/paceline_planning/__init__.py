"""``paceline plan``, and ``--strategy auto`` for large models: memory and time of a step under each strategy."""
