"""``--on kubernetes``: manifests, and the API server that they are submitted to."""
