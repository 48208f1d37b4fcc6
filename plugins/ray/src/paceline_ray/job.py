"""Runs a job on the nodes of an engine of actors: ``python -m paceline_ray.job MODULE FILE``.

The engine of the module, Ray or Monarch, starts an actor on each node, which runs what every launcher starts there
(:mod:`paceline.launch.node`). This process follows them: it shows what they print, passes signals on, and replaces a
node that was lost where the job can take another one in.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from paceline.core.errors import PacelineError


def main(argv: Sequence[str]) -> int:
    """Run the job; return its exit code."""
    module, file = argv
    try:
        code: int = import_module(module).run_job(Path(file))
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
