"""Runs a job on Monarch's hosts: ``python -m paceline_frameworks.monarch_job FILE``.

Monarch starts an actor on each host, which runs what every launcher starts there (:mod:`paceline.launch.node`). This
process follows them: it shows what they print, passes signals on, and replaces a host that was lost where the job can
take another one in.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline_frameworks.monarch import MonarchJob, MonarchJobController, import_monarch


def main(argv: Sequence[str]) -> int:
    """Run the job; return its exit code."""
    try:
        job = MonarchJob.read(Path(argv[0]))
        return MonarchJobController(import_monarch(), job).run()
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
