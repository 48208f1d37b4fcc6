"""How processes start: on this machine, by ssh, MPI and Slurm."""
