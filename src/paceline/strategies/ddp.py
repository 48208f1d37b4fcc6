"""Distributed data parallel: every rank holds the model and computes its share of the shards."""

from __future__ import annotations

from paceline.strategies.shard_by_shard import ReducerStrategy


class DDP(ReducerStrategy):
    """Data parallelism with Paceline's reducer (``--reduction exact`` or ``fast``)."""
