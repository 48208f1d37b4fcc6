"""``paceline plan``, ``--strategy auto`` for large models, and ``--profile``: memory and time of a step."""
