"""``--on kubernetes``: jobs on a Kubernetes cluster."""
