"""Elastic membership: agents start, watch and replace the workers of a job."""
