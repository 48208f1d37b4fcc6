"""One job whose workers are killed as a script says, started again until it ends; imports no torch."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import LaunchError
from paceline.insight.bench.faults import FaultScript, Kill
from paceline.insight.bench.rounds import end_processes, log_tails
from paceline.insight.bench.workload import STEPS_PER_EPOCH

STEP_S = 0.02
"""Added to each step, so that a step is not over before anybody could be lost in it."""

_POLL_S = 0.05
_START_S = 120.0
_STOCK_SCRIPT = Path(__file__).with_name("stock_torchrun.py")


@dataclass(frozen=True, kw_only=True)
class Recoverer:
    """Something that goes on after a worker was killed.

    Attributes:
        name: for machines.
        title: for people.
        command: a trial's directory, workers, steps -> the command that trains there, and that goes on where
            it stands when it is given again.
        undisturbed: the name of the run without faults that its weights and its time are compared with.
        result: the file, in a trial's directory, that holds ``model_sha256``.
    """

    name: str
    title: str
    command: Callable[[Path, int, int], list[str]]
    undisturbed: str
    result: str


def _stock(directory: Path, nproc: int, steps: int) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    script = [str(_STOCK_SCRIPT), str(directory), str(steps // STEPS_PER_EPOCH)]
    return [sys.executable, *torchrun, "--max-restarts=1000", *script]


def _paceline(*options: str) -> Callable[[Path, int, int], list[str]]:
    def command(directory: Path, nproc: int, steps: int) -> list[str]:
        return [
            *(
                sys.executable,
                "-m",
                "paceline",
                "train",
                "paceline.insight.bench.disturbed:Disturbed",
                "--quiet",
            ),
            *("--set", f"script={directory}", "--run-dir", str(directory / "run"), "--device", "cpu"),
            *(
                "--nproc",
                str(nproc),
                "--microbatches",
                str(nproc),
                "--threads",
                "1",
                "--max-steps",
                str(steps),
            ),
            *("--checkpoint-every", f"{STEPS_PER_EPOCH}steps", "--eval-every", "never", *options),
        ]

    return command


RECOVERERS = {
    recoverer.name: recoverer
    for recoverer in (
        Recoverer(
            name="torchrun",
            title="stock torchrun",
            command=_stock,
            undisturbed="torchrun",
            result="result.json",
        ),
        Recoverer(
            name="paceline-torchrun",
            title="torchrun + Paceline",
            command=_paceline("--on", "torchrun", "--recover", "restart", "--max-restarts", "1000"),
            undisturbed="paceline",
            result="run/result.json",
        ),
        Recoverer(
            name="paceline-inplace",
            title="Paceline in place",
            command=_paceline("--on", "spawn", "--recover", "inplace"),
            undisturbed="paceline",
            result="run/result.json",
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class RecoveryTrial:
    """One job, from its start to its end, over all that befell it.

    Attributes:
        kills: workers that were killed.
        recoveries_ms: from each kill that the job survived to the end of the step that it had interrupted.
        hung: kills after which no step came, until the job was ended and started again.
        failed: kills after which the job ended itself, and was started again.
        repeated: steps that were done more than once.
        seconds: from the first step to the last.
        model_sha256: of the weights in the end.
    """

    kills: int
    recoveries_ms: Sequence[float]
    hung: int
    failed: int
    repeated: int
    seconds: float
    model_sha256: str


@dataclass
class _Watch:
    """When a job was started, again and again, and why it had to be."""

    starts: list[float] = field(default_factory=list)
    hung: list[bool] = field(default_factory=list)


def run_trial(recoverer: Recoverer, kills: list[Kill], nproc: int, steps: int, hang_after_s: float) -> RecoveryTrial:
    """Train ``steps`` steps on ``nproc`` workers, of which some are killed.

    Raises:
        LaunchError: the job ends, or hangs, without a kill that explains it.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        directory = Path(name)
        script = FaultScript.write(directory, kills, world_size=nproc, step_s=STEP_S)
        watch = _Watch()
        while not _run_once(recoverer, directory, script, watch, nproc, steps, hang_after_s):
            if len(watch.starts) > len(script.killed_at()):
                raise LaunchError(
                    f"bench: {recoverer.title} made no progress though nothing was killed.{log_tails(directory)}"
                )
        result = json.loads((directory / recoverer.result).read_text(encoding="utf-8"))
        return judge(script, watch.starts, watch.hung, str(result["model_sha256"]))


def _run_once(
    recoverer: Recoverer,
    directory: Path,
    script: FaultScript,
    watch: _Watch,
    nproc: int,
    steps: int,
    hang_after_s: float,
) -> bool:
    """Start the job and watch it; whether it came to its end, rather than to be started again."""
    watch.starts.append(time.time())
    with (directory / f"process-{len(watch.starts)}.log").open("wb") as log:
        process = subprocess.Popen(
            recoverer.command(directory, nproc, steps),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        size, since, limit_s = _recorded_bytes(directory), time.monotonic(), _START_S
        while process.poll() is None:
            time.sleep(_POLL_S)
            now = _recorded_bytes(directory)
            if now != size:
                size, since, limit_s = now, time.monotonic(), hang_after_s
            elif time.monotonic() - since > limit_s:
                watch.hung.append(True)
                return False
        if process.returncode != 0:
            watch.hung.append(False)
        return process.returncode == 0
    finally:
        end_processes([process])


def _recorded_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("steps-*.txt"))


def judge(script: FaultScript, starts: Sequence[float], hung: Sequence[bool], model_sha256: str) -> RecoveryTrial:
    """What the records of a finished job say.

    Args:
        script: with its records.
        starts: when the job was started: first, and again after it had hung or failed.
        hung: of each start but the last, whether it was ended because it hung.
        model_sha256: of its weights.
    """
    done = script.steps()
    recoveries_ms, repeated, lost = [], 0, {True: 0, False: 0}
    kills = script.killed_at()
    for killed, interrupted in kills:
        before = max((step for when, step in done if when < killed), default=0)
        after = [(when, step) for when, step in done if when >= killed]
        # A step that the others ended while the victim died is no sign of life yet.
        again = next((when for when, step in after if step >= interrupted), math.inf)
        restarted = [index for index, start in enumerate(starts) if killed < start < again]
        if restarted:
            lost[hung[restarted[0] - 1]] += 1
        else:
            recoveries_ms.append(1000 * (again - killed))
        first = next((step for _, step in after), before + 1)
        repeated += max(0, before - first + 1)
    return RecoveryTrial(
        kills=len(kills),
        recoveries_ms=recoveries_ms,
        hung=lost[True],
        failed=lost[False],
        repeated=repeated,
        seconds=done[-1][0] - done[0][0],
        model_sha256=model_sha256,
    )
