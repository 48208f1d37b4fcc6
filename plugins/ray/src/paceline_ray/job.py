"""Runs a job on the machines of a Ray cluster: ``python -m paceline_ray.job FILE``.

Ray finds the machines and starts an actor on each, which runs what every launcher starts there
(:mod:`paceline.launch.node`). This process follows them: it shows what they print, passes signals on, and
replaces a machine that was lost where the job can take another one in. Ray ends the actors with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline_ray.cluster import connect, import_ray
from paceline_ray.launcher import RayJob, RayJobController


def main(argv: Sequence[str]) -> int:
    """Run the job; return its exit code."""
    try:
        job = RayJob.read(Path(argv[0]))
        # It tells why each attempt to connect has failed, and would try twenty times.
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "5")
        ray = import_ray()
        connect(ray, os.environ["RAY_ADDRESS"])
        try:
            return RayJobController(ray, job).run()
        finally:
            ray.shutdown()
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
