"""The rank of a process that horovodrun has started, from its variables. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from paceline.core.environment import Environment, integer_of, rank_by_variables

_VARIABLES = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")


def detect_horovod(environ: Mapping[str, str]) -> Environment:
    """Return the rank of this process.

    Raises:
        ConfigError: a variable is malformed, or missing.
    """
    environment = rank_by_variables("horovod", environ, _VARIABLES)
    server = [environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{part}", "") for part in ("ADDR", "PORT")]
    return replace(
        environment,
        node_rank=integer_of(environ, "HOROVOD_CROSS_RANK", environment.node_rank),
        nodes=integer_of(environ, "HOROVOD_CROSS_SIZE", environment.nodes),
        job_id="-".join(server) if all(server) else None,
    )
