"""Preflight checks of every node of a job, and of the network between them, before the job runs."""
