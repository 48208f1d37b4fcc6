"""torchrun, whose ranks get a pipe each for their output: ``python torchrun_agent.py ARGUMENTS``.

They would share this process's own, in which the pieces of their lines mix. The pipes are those of the launcher, which
passes whole lines on. Run by path, with nothing of Paceline: the Python of a script need not have it.
"""

from __future__ import annotations

import json
import os
import sys

RANK_OUTPUTS = "PACELINE_RANK_OUTPUTS"
"""For each local rank, the descriptors of this process that replace 1 and 2 there, as JSON."""


def main() -> None:
    """Run torchrun; a rank whose output the options send elsewhere keeps that."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

    pipes: list[dict[str, int]] = json.loads(os.environ.pop(RANK_OUTPUTS))

    as_chosen = DefaultLogsSpecs.reify

    def reify(specs: DefaultLogsSpecs, envs: dict[int, dict[str, str]]) -> LogsDest:
        logs = as_chosen(specs, envs)
        for descriptor, paths in (("1", logs.stdouts), ("2", logs.stderrs)):
            for local_rank, path in paths.items():
                if not path and descriptor in pipes[local_rank]:
                    paths[local_rank] = f"/dev/fd/{pipes[local_rank][descriptor]}"
        return logs

    DefaultLogsSpecs.reify = reify  # type: ignore[assignment, method-assign]
    run.main()


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # this directory, which has a ray.py
    sys.argv[0] = "torchrun"
    main()
