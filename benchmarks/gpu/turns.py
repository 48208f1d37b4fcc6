"""Contenders that train on the same GPUs in turns, each in processes of its own that wait while another one trains.

To start a process, import torch and fill a GPU takes many seconds, a measured turn takes one: so all start at the same
time, and a conductor lets one after another run some steps. A turn begins with steps that are not measured, in which
the allocator takes its memory again that it gave back at the end of the turn before.
"""

from __future__ import annotations

import collections
import json
import subprocess
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from benchmarks.gpu.rows import IS_REAL

WARMUP, MEASURED, COUNTED = 3, 8, 4
"""Steps of a turn that are not measured, those that are, and those of the last turn, whose host waits are counted."""

_GO = "go"
_POLL_S = 0.005


def steps_of(rounds: int) -> int:
    """Return how many steps a contender has to train in all: a first turn, the rounds, and the counted steps."""
    return (rounds + 1) * (WARMUP + MEASURED) + COUNTED + 1


@dataclass
class Turns:
    """One rank's side: call :meth:`before_step` before each step.

    Attributes:
        directory: where the conductor and the contenders meet.
        name: the contender's.
        rounds: measured turns; the first turn is not one.
        rank: of this process.
    """

    directory: Path
    name: str
    rounds: int
    rank: int
    _clock: float = field(default=0.0, init=False)
    _waits: HostWaits | None = field(default=None, init=False)

    def before_step(self, step: int) -> None:
        """Wait for this contender's turn if one begins, and measure it when it ends."""
        import torch

        turn, position = divmod(step, WARMUP + MEASURED)
        if turn <= self.rounds and position == WARMUP:
            torch.cuda.synchronize()
            self._clock = time.perf_counter()
        if position == 0 and turn <= self.rounds + 1:
            if turn:
                torch.cuda.synchronize()
                self._end(turn - 1, {"seconds": time.perf_counter() - self._clock})
            self._wait(turn)
            torch.cuda.reset_peak_memory_stats()
            if turn == self.rounds + 1:
                self._waits = HostWaits()
                self._waits.start()
        if turn == self.rounds + 1 and position == COUNTED:
            assert self._waits is not None
            self._waits.stop()
            self._end(turn, {"waits": self._waits.by_place()})

    def _end(self, turn: int, found: dict[str, Any]) -> None:
        import torch

        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        path = self.directory / f"{self.name}.{turn}.{self.rank}"
        path.with_suffix(".new").write_text(json.dumps(found))
        path.with_suffix(".new").replace(path)

    def _wait(self, turn: int) -> None:
        while (self.directory / _GO).read_text() != f"{self.name} {turn}":
            time.sleep(_POLL_S)


class HostWaits:
    """Counts the host waits for the GPU, by the line of Python that waits.

    torch warns of operations that wait (items, copies from and to pageable memory); of the calls that ask for a wait
    (devices, streams, events) it does not warn, so they are counted.
    """

    _WORDS = "synchronizing CUDA operation"

    def __init__(self) -> None:
        self._found: collections.Counter[str] = collections.Counter()
        self._undo = ExitStack()

    def start(self) -> None:
        """Begin to count."""
        import torch

        self._undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        warnings.showwarning = self._on_warning
        for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream):
            self._count_calls(owner, "synchronize")
        if IS_REAL:
            torch.cuda.set_sync_debug_mode("warn")
            self._undo.callback(torch.cuda.set_sync_debug_mode, "default")

    def stop(self) -> None:
        """Count no more."""
        self._undo.close()

    def by_place(self) -> dict[str, int]:
        """Return how often each line waited, the most frequent first."""
        return dict(self._found.most_common())

    def _on_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if self._WORDS in str(message):
            self._found[f"{'/'.join(Path(filename).parts[-2:])}:{lineno}"] += 1

    def _count_calls(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._found[f"{owner.__name__}.{name}"] += 1
            return original(*args, **kwargs)

        setattr(owner, name, counted)
        self._undo.callback(setattr, owner, name, original)


# --- the conductor ---


@dataclass(frozen=True)
class Contender:
    """Something that trains.

    Attributes:
        name: for files.
        title: for people.
        commands: of its processes.
        ranks: how many processes take part in its turns, from rank 0.
    """

    name: str
    title: str
    commands: Sequence[Sequence[str]]
    ranks: int


@dataclass
class Measured:
    """The measurements of one contender.

    Attributes:
        seconds: of the measured steps of each round.
        peak_bytes: the greatest of all ranks.
        waits: host waits of the counted steps on rank 0, by place.
        problem: why it did not come to its end, or None.
    """

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    waits: dict[str, int] = field(default_factory=dict)
    problem: str | None = None

    def add(self, ranks: Sequence[dict[str, Any]], turn: int, rounds: int) -> None:
        """Add a turn: the measurements of each rank."""
        if turn:  # in the first one libraries try kernels
            self.peak_bytes = max(self.peak_bytes, *(rank["peak_bytes"] for rank in ranks))
        if turn == rounds + 1:
            self.waits = ranks[0]["waits"]
        elif turn:
            self.seconds.append(ranks[0]["seconds"])


def conduct(contenders: Sequence[Contender], directory: Path, rounds: int, seconds: float) -> dict[str, Measured]:
    """Let contenders train in turns; one that fails drops out, and the others continue.

    Args:
        contenders: another one begins each round.
        directory: for their files and logs.
        rounds: measured turns of each.
        seconds: after them all end, with what is measured by then.
    """
    deadline = time.monotonic() + seconds
    measured = {contender.name: Measured() for contender in contenders}
    (directory / _GO).write_text("")
    with _started(contenders, directory) as processes:
        for turn in range(rounds + 2):
            first = turn % len(contenders)
            for contender in (*contenders[first:], *contenders[:first]):
                found = measured[contender.name]
                if found.problem is None:
                    take = _take_turn(contender, turn, processes[contender.name], directory, deadline)
                    if isinstance(take, str):
                        found.problem = take
                    else:
                        found.add(take, turn, rounds)
                if turn == rounds + 1 or found.problem is not None:
                    _end(processes[contender.name])  # nothing more is measured: the others may have its memory
    return measured


@contextmanager
def _started(contenders: Sequence[Contender], directory: Path) -> Iterator[dict[str, list[subprocess.Popen[bytes]]]]:
    """Start all; the row's end, which ends all of its session, ends them too."""
    processes: dict[str, list[subprocess.Popen[bytes]]] = {}
    try:
        for contender in contenders:
            with (directory / f"{contender.name}.log").open("ab") as log:
                processes[contender.name] = [
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
                    for command in contender.commands
                ]
        yield processes
    finally:
        _end([process for of_contender in processes.values() for process in of_contender])


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _take_turn(
    contender: Contender,
    turn: int,
    processes: Sequence[subprocess.Popen[bytes]],
    directory: Path,
    deadline: float,
) -> list[dict[str, Any]] | str:
    """Let a contender have its turn; return what each rank measured, or what went wrong."""
    (directory / f"{_GO}.new").write_text(f"{contender.name} {turn}")
    (directory / f"{_GO}.new").replace(directory / _GO)
    paths = [directory / f"{contender.name}.{turn}.{rank}" for rank in range(contender.ranks)]
    while not all(path.exists() for path in paths):
        if any(process.poll() not in (None, 0) for process in processes):
            return _last_words(directory / f"{contender.name}.log")
        if time.monotonic() > deadline:
            return f"the time was over in turn {turn} of this contender"
        time.sleep(_POLL_S)
    return [json.loads(path.read_text()) for path in paths]


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it printed nothing"])[-1][:200]
