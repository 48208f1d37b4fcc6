"""Who takes part in a job: agents start, watch and replace workers."""
