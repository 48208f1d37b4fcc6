"""How processes start: on this machine, by ssh, MPI, Slurm, Ray, Monarch, Kubernetes, and in clouds."""
