"""How processes start: on this machine, by ssh, MPI, Slurm and Ray."""
