"""How the agents of several nodes agree on who leads the job."""
