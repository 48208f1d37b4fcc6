"""Preloaded by the fork server of the data workers.

The server is a single-threaded process with torch already imported, so a worker starts in milliseconds and shares
torch's memory. A scheduler that ends a job signals every process of it, but the trainer still needs the batches of its
last steps; the server therefore ignores SIGTERM and SIGUSR1, and ends when the trainer does.
"""

from __future__ import annotations

import os
import signal

import torch  # noqa: F401

import paceline.data.samples  # noqa: F401

_IGNORED = (signal.SIGTERM, signal.SIGUSR1)


def _restore_signals() -> None:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)


for number in _IGNORED:
    signal.signal(number, signal.SIG_IGN)
# Other code may fork from multiprocessing's shared server too; its processes must still end on signals.
os.register_at_fork(after_in_child=_restore_signals)
