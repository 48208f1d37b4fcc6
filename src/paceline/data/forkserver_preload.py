"""Imported first by the server that data workers are forked from.

The server forks from a process without threads in which torch is imported already, so a worker starts
in milliseconds and shares torch's memory. A scheduler that ends a job signals every process of it; the
trainer then still wants the batches of its last steps, so the server does not end on SIGTERM or
SIGUSR1. It ends when the trainer has.
"""

from __future__ import annotations

import os
import signal

import torch  # noqa: F401

import paceline.data.samples  # noqa: F401

_IGNORED = (signal.SIGTERM, signal.SIGUSR1)


def _heed() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)


for number in _IGNORED:
    signal.signal(number, signal.SIG_IGN)
# The server is multiprocessing's own and shared: what others start from it ends on signals as usual.
os.register_at_fork(after_in_child=_heed)
