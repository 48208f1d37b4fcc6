"""``--on ray``, and Ray clusters of a job's own."""
