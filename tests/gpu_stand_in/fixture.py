"""A pytest plugin: GPUs for a CPU build of torch, in the processes that a test starts; see ``device.cpp``.

Their tensors lie in the host's memory and are computed by the CPU's kernels. They cannot show: streams that run at the
same time, the order of sums in a GPU's kernels, NCCL's own errors, memory that is full.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

HERE = Path(__file__).parent


@dataclass(frozen=True)
class StepWaits:
    """The waits of one rank in one step, by the line of Paceline and their cause.

    Attributes:
        device: for the device.
        gloo: for messages through gloo; they do not count as waits for the device.
        before: for the device, between the step before and this one.
    """

    rank: int
    step: int
    device: dict[str, int]
    gloo: dict[str, int]
    before: dict[str, int]


def stand_in_variables(folder: Path, gpus: int) -> dict[str, str]:
    """Return the variables that give a process, and all that it starts, GPUs with their reports in a folder."""
    library = folder / "device.so"
    if not library.exists():
        library.symlink_to(_built())
    return {
        "GPU_STAND_IN": str(folder),
        "GPU_STAND_IN_COUNT": str(gpus),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))),
        "PYTHONPATH": os.pathsep.join([str(HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


class GpuStandIn:
    """The variables that give a process GPUs, and what these have counted.

    Args:
        folder: where the processes leave their reports.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def env(self, gpus: int = 2, **variables: str) -> dict[str, str]:
        """Return the variables of a process on a machine with so many GPUs, and all that it starts."""
        return {**stand_in_variables(self._folder, gpus), **variables}

    def waits(self, run: Path) -> list[StepWaits]:
        """Return the waits of a run's steps, of all of its ranks."""
        lines = [line for report in self._folder.glob("*.waits") for line in report.read_text().splitlines()]
        found = [json.loads(line) for line in lines]
        return [
            StepWaits(**{key: value for key, value in line.items() if key != "run"})
            for line in found
            if Path(line["run"]) == run.resolve()
        ]


def most_waits(steps: list[StepWaits]) -> dict[str, int]:
    """Return the waits of the step that has the most of them."""
    return max((step.device for step in steps), key=lambda waits: sum(waits.values()))


def total_waits(steps: list[StepWaits]) -> Counter[str]:
    """Return the waits of all steps."""
    return sum((Counter(step.device) for step in steps), Counter())


@pytest.fixture(scope="session")
def gpu_stand_in(tmp_path_factory: pytest.TempPathFactory) -> GpuStandIn:
    """GPUs for the processes that are started with ``gpu_stand_in.env()``."""
    if torch.backends.cuda.is_built():
        pytest.skip("this build of torch has CUDA, whose own kernels a pretended GPU cannot replace")
    return GpuStandIn(tmp_path_factory.mktemp("gpu-stand-in"))


class Runner(Protocol):
    def free_port(self) -> int: ...

    def start(self, argv: list[str], *, env: dict[str, str]) -> subprocess.Popen[str]: ...

    def finish(self, popen: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]: ...

    def paceline(self, *arguments: str | Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]: ...


_BEGINNING = """
import gpu_stand_in, os, torch

def waits():
    return sum(gpu_stand_in._take_counts()["device"].values())

def refused(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return "not refused"

def check(value, what):
    assert value, what
"""


def run_program(
    processes: Runner, gpu_stand_in: GpuStandIn, program: str, ranks: int = 1, **env: str
) -> list[subprocess.CompletedProcess[str]]:
    """Run a program in some ranks on a machine with two GPUs; it can call ``waits``, ``refused`` and ``check``."""
    text = _BEGINNING + textwrap.dedent(program)
    port = str(processes.free_port())
    variables = gpu_stand_in.env(**env) | {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        processes.start([sys.executable, "-c", text], env=variables | {"RANK": str(rank)}) for rank in range(ranks)
    ]
    return [processes.finish(popen) for popen in started]


@dataclass(frozen=True)
class GpuRun:
    """A finished run.

    Attributes:
        record: the content of ``result.json``.
        steps: the waits of each rank and step.
        output: what the command printed.
    """

    record: dict[str, Any]
    steps: list[StepWaits]
    output: str


class TrainOnGpus(Protocol):
    def __call__(self, task: str, *options: str, gpus: int = 2, **env: str) -> GpuRun: ...


@pytest.fixture
def train_on_gpus(gpu_stand_in: GpuStandIn, run_processes: Runner, tmp_path: Path) -> TrainOnGpus:
    """Train a task with ``paceline train TASK OPTIONS`` on a machine with GPUs."""
    count = 0

    def train(task: str, *options: str, gpus: int = 2, **env: str) -> GpuRun:
        nonlocal count
        count += 1
        run = tmp_path / f"on-gpus-{count}"
        done = run_processes.paceline(
            "train", task, "--run-dir", run, "--threads", "1", *options, env=gpu_stand_in.env(gpus, **env)
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return GpuRun(json.loads((run / "result.json").read_text()), gpu_stand_in.waits(run), done.stdout + done.stderr)

    return train


def _built() -> Path:
    """Return the library, built for this environment's torch once."""
    import torch
    from torch.utils import cpp_extension

    source = HERE / "device.cpp"
    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(sys.prefix) / "gpu-stand-in" / f"{key}.so"
    library.parent.mkdir(exist_ok=True)
    with (library.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other pytest worker may build it
        if not library.exists():
            unfinished = library.with_suffix(".unfinished")
            flags = [f"-I{path}" for path in cpp_extension.include_paths()]
            for path in cpp_extension.library_paths():
                flags += [f"-L{path}", f"-Wl,-rpath,{path}"]
            flags += ["-Wl,--no-as-needed", "-lc10", "-ltorch_cpu"]
            subprocess.run(
                ["g++", "-O1", "-shared", "-fPIC", "-std=c++20", "-w", source, "-o", unfinished, *flags],
                check=True,
            )
            unfinished.rename(library)
    return library
