"""How processes start: on this machine, by ssh, MPI, Slurm, Ray, Kubernetes, and in clouds."""
