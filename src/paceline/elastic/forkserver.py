"""Forks workers, and the host of their stores: ``python -m paceline.elastic.forkserver FD``.

A worker that died is replaced in milliseconds, by a fork of this process; see
:mod:`paceline.core.fork_server`. A request for a worker is ``{"fork": number, "slot": s, "job": path}``, with
the worker's end of its channel and, above slot 0, its log; one for the store host has the number ``STORE_HOST``
and the host's end of its socket pair.

This process lives as long as its agent: when the agent's end closes, it kills what it has forked. Until the
workers have saved they need the store host, so only workers are stopped by signals.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.core.fork_server import Child, redirect_output, restore_stop_signals, run_fork_server
from paceline.elastic.rendezvous_store import STORE_HOST

_WORKER = "paceline.training.worker"
"""What the forked processes run: a layer above this one, so it is imported by its name."""


def prepare_child(request: Mapping[str, Any], descriptors: Sequence[int]) -> Child:
    """Make a forked process a worker, or the store host."""
    if request["fork"] == STORE_HOST:
        return lambda: _serve_stores(descriptors[0])
    restore_stop_signals()
    channel, *log = descriptors
    # A worker that rises to rank 0 later prints to the terminal, wherever it prints now.
    terminal = (os.dup(1), os.dup(2))
    if log:
        redirect_output(log[0])
    return lambda: _run_worker(request["job"], channel, request["slot"], terminal)


def _run_worker(job: str, channel: int, slot: int, terminal: tuple[int, int]) -> int:
    sys.argv = [_WORKER, job]
    code: int = importlib.import_module(_WORKER).main_member(Path(job), channel, slot, terminal)
    return code


def _serve_stores(commands: int) -> int:
    from paceline.elastic.store_host import serve

    return serve(commands)


def _preload() -> None:
    import paceline.elastic.store_host  # noqa: F401

    importlib.import_module(_WORKER).preload()


if __name__ == "__main__":
    sys.exit(run_fork_server(int(sys.argv[1]), _preload, prepare_child))
