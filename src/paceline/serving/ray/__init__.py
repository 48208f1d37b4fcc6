"""Models on Ray Serve: replicas on the machines of a cluster, behind the same server."""
