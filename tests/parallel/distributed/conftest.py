"""The reducer's reports: one run for each number of ranks, looked at by the tests of several files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.parallel.distributed.stage_cluster import cluster
from tests.processes import Processes

__all__ = ["cluster"]

HERE = Path(__file__).parent
WORLD_SIZES = (1, 2, 3, 4)

Report = dict[str, Any]


def start_ranks(
    processes: Any, world_size: int, script: str, argument: Callable[[int], str | Path], **env: str
) -> list[subprocess.Popen[str]]:
    """Start a script of this directory once for each rank, with an argument that may depend on it."""
    port = processes.free_port()
    return [
        processes.start(
            [sys.executable, HERE / script, argument(rank)],
            env={
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                **env,
            },
        )
        for rank in range(world_size)
    ]


@pytest.fixture(scope="session")
def reports(session_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Report]]:
    """What ``reduction_worker.py`` reported: for each number of ranks, each rank's report."""
    directory = tmp_path_factory.mktemp("reduction")
    found = {}
    for world_size in WORLD_SIZES:
        paths = [directory / f"{world_size}-{rank}.json" for rank in range(world_size)]
        ranks = start_ranks(session_processes, world_size, "reduction_worker.py", paths.__getitem__)
        finished = [session_processes.finish(rank, timeout_s=240) for rank in ranks]
        errors = "\n".join(f"--- rank {rank}\n{f.stderr}" for rank, f in enumerate(finished))
        assert [f.returncode for f in finished] == [0] * world_size, errors
        found[world_size] = [json.loads(path.read_text()) for path in paths]
    return found


@pytest.fixture
def survivors(run_processes: Any) -> Callable[[str], list[Report]]:
    """Run ``lost_peer_worker.py MODE`` on three ranks and kill rank 2 while the others wait for it.

    Returns what these two then report; they stay alive until the test ends.
    """

    def run(mode: str) -> list[Report]:
        ranks = start_ranks(run_processes, 3, "lost_peer_worker.py", lambda _: mode)
        for rank in ranks:
            line = rank.stdout.readline()
            assert line == "ready\n", rank.stderr.read()
        ranks[2].kill()
        lines = [rank.stdout.readline() for rank in ranks[:2]]
        assert all(lines), [rank.stderr.read() for rank, line in zip(ranks, lines, strict=False) if not line]
        return [json.loads(line) for line in lines]

    return run
