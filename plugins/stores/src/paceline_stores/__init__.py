"""Runs in object stores, by address: ``--backup-to s3://bucket/run1``."""
