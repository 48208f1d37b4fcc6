"""The seed of Python's hashes, which decides the order of a ``set`` of strings: the same in every process of a run.

Python reads the seed when it starts, so a process that trains and has no seed restarts itself with one. A seed that the
user has set stays, and so does ``random``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

_VARIABLE = "PYTHONHASHSEED"
_SEED = "0"  # as Python documents it: no randomization


def with_hash_seed(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a process that trains, or that forks such processes."""
    return {_VARIABLE: _SEED, **environ}


def restart_with_hash_seed() -> None:
    """Start this program again, in this process, unless its hashes have a seed; call this before anything has begun."""
    if _VARIABLE not in os.environ and sys.executable:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], with_hash_seed(os.environ))
