"""How processes start, and where: a job is described, rendered as text, then submitted."""
