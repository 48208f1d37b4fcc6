"""``paceline verify``: what a task computes under each strategy, compared with one process."""
