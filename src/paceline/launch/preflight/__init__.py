"""Preflight checks: every machine of a job, and the network between them, before the job runs."""
