"""Scripted deaths of workers, and a record of the steps between them; no torch is imported."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.core.files import write_atomically

GLOBAL_BATCH_SIZE = 48
STEPS_PER_EPOCH = 10
"""Of what is trained while workers are killed; every process count from 1 to 4 divides the batch."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """``kill -9`` of one rank, in its first forward pass of ``step`` or later (from 1) in the full world."""

    step: int
    rank: int


class FaultScript:
    """The kills of one job's workers: each once, in turn, however often the workers restart.

    All that must survive a kill is in files: which kills were done and when, and when each step was.

    Args:
        directory: holds the script and its records; of one job.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        document = json.loads((directory / "script.json").read_text(encoding="utf-8"))
        self.kills = [Kill(**kill) for kill in document["kills"]]
        self._world_size: int = document["world_size"]
        self._step_s: float = document["step_s"]

    @classmethod
    def write(cls, directory: Path, kills: list[Kill], *, world_size: int, step_s: float) -> FaultScript:
        """Write a script for ``world_size`` ranks whose steps take ``step_s`` seconds longer than they do."""
        document = {"kills": [asdict(kill) for kill in kills], "world_size": world_size, "step_s": step_s}
        write_atomically(directory / "script.json", json.dumps(document).encode())
        return cls(directory)

    def before_step(self, step: int, rank: int, world_size: int) -> None:
        """Called in a step's forward pass: kills this process if it is its turn."""
        if world_size != self._world_size:
            return
        done = len(list(self.directory.glob("kill-*.json")))
        if done < len(self.kills) and step >= self.kills[done].step and rank == self.kills[done].rank:
            record = json.dumps({"time": time.time(), "step": step})
            write_atomically(self.directory / f"kill-{done:04d}.json", record.encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, step: int, rank: int) -> None:
        """Called when a step's update is done: rank 0 records it."""
        if rank == 0:
            with (self.directory / f"steps-{os.getpid()}.txt").open("a", encoding="ascii") as file:
                file.write(f"{time.time()} {step}\n")
        time.sleep(self._step_s)

    def killed_at(self) -> list[tuple[float, int]]:
        """Time (seconds since the epoch) and step of each kill that was done, in order."""
        records = [json.loads(path.read_bytes()) for path in sorted(self.directory.glob("kill-*.json"))]
        return [(record["time"], record["step"]) for record in records]

    def steps(self) -> list[tuple[float, int]]:
        """Time and number of each step that was done, again or for the first time, in the order of time."""
        lines = [
            line.split()
            for path in self.directory.glob("steps-*.txt")
            for line in path.read_text(encoding="ascii").splitlines()
        ]
        # A killed process leaves at most one line cut short.
        return sorted((float(line[0]), int(line[1])) for line in lines if len(line) == 2)


def drawn_kills(seed: int, count: int, *, world_size: int, spacing: int) -> list[Kill]:
    """``count`` kills of random ranks, each ``spacing`` to 1.5 ``spacing`` steps after the one before."""
    draw = random.Random(seed)
    kills, step = [], 0
    for _ in range(count):
        step += spacing + draw.randrange(max(1, spacing // 2))
        kills.append(Kill(step=step, rank=draw.randrange(world_size)))
    return kills
