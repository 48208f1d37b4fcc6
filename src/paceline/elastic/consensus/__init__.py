"""Consensus of the agents of several nodes on the leader and the set of nodes."""
