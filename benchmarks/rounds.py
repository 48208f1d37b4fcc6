"""Rounds: each starts fresh processes for one contender, and contenders take turns; no torch is imported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from paceline.core.errors import LaunchError
from paceline.core.signals import handle_signals, interrupt_at_exit

Sample = dict[str, float]
"""What one round measured: name -> value."""

REPORT = "report.json"
"""The measured process's report, in a round's directory."""

_ROUND_TIMEOUT_S = 1800.0
_GRACE_S = 5.0
_POLL_S = 0.2
_LOG_TAIL_LINES = 15
_TURN_S = 0.004


@dataclass(frozen=True)
class BenchCommand:
    """One process of a round.

    Attributes:
        argv: the command line.
        variables: added to its environment.
        half_speed: let it run half of the time only, in turns of some milliseconds (SIGSTOP, SIGCONT).
    """

    argv: Sequence[str]
    variables: dict[str, str] = field(default_factory=dict)
    half_speed: bool = False


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def read_report(directory: Path) -> Sample:
    """Return the measured process's report, with the step rate and the step time that follow from it."""
    report: Sample = read_json(directory / REPORT)
    report["steps_per_s"] = report["steps"] / report["seconds"]
    report["ms_per_step"] = 1000 * report["seconds"] / report["steps"]
    return report


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Something that is measured against others.

    Attributes:
        name: for machines.
        title: for people.
        commands: a round's directory -> the processes to start there.
        read: the directory, after they ended -> what was measured.
    """

    name: str
    title: str
    commands: Callable[[Path], Sequence[BenchCommand]]
    read: Callable[[Path], Sample] = read_report


def interleave(
    contenders: Sequence[Variant], rounds: int, on_sample: Callable[[int, Variant, Sample], None]
) -> dict[str, list[Sample]]:
    """Measure all contenders in each round; the one that begins moves on by one from round to round.

    Args:
        contenders: at least one.
        rounds: samples to take of each.
        on_sample: called with the round's number, from 1, and what was measured.

    Returns:
        Contender's name -> one sample a round.

    Raises:
        LaunchError: a process failed or hung; all of them have been ended.
    """
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    with handle_signals((signal.SIGTERM,), signal.default_int_handler):
        for number in range(rounds):
            first = number % len(contenders)
            for contender in [*contenders[first:], *contenders[:first]]:
                sample = _measure(contender)
                samples[contender.name].append(sample)
                on_sample(number + 1, contender, sample)
    return samples


def _measure(contender: Variant) -> Sample:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        directory = Path(name)
        _run_to_the_end(contender, directory)
        try:
            return contender.read(directory)
        except FileNotFoundError as error:
            raise LaunchError(
                f"bench: {contender.title} ended without its measurement ({error.filename} is missing)."
                f"{log_tails(directory)}"
            ) from None


def _run_to_the_end(contender: Variant, directory: Path) -> None:
    processes: list[subprocess.Popen[bytes]] = []
    throttles = ExitStack()
    try:
        for index, command in enumerate(contender.commands(directory)):
            with (
                (directory / f"process-{index}.log").open("wb") as log,
                interrupt_at_exit((signal.SIGINT, signal.SIGTERM)),
            ):
                process = subprocess.Popen(
                    command.argv,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **command.variables},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # A Ctrl-C in the terminal is for us alone; we end the others below.
                    process_group=0,
                )
                processes.append(process)
            if command.half_speed:
                throttles.enter_context(_half_speed(process))
        _wait(contender, processes, directory)
    finally:
        throttles.close()  # a stopped process could not be ended politely
        end_processes(processes)


@contextmanager
def _half_speed(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Stop and continue a process in turns. A turn is short against a micro-batch, so it seems to run slowly."""
    done = threading.Event()

    def take_turns() -> None:
        while not done.wait(_TURN_S):
            process.send_signal(signal.SIGSTOP)
            time.sleep(_TURN_S)
            process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=take_turns, name="paceline-bench-throttle", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _wait(contender: Variant, processes: Sequence[subprocess.Popen[bytes]], directory: Path) -> None:
    deadline_s = time.monotonic() + _ROUND_TIMEOUT_S
    running = list(processes)
    while running:
        with suppress(subprocess.TimeoutExpired):
            running[0].wait(timeout=_POLL_S)
        # Any of them may be the one that fails, and the others would wait for it.
        exit_codes = [process.poll() for process in processes]
        failed = [code for code in exit_codes if code]
        if failed:
            raise LaunchError(f"bench: {contender.title} failed with exit code {failed[0]}.{log_tails(directory)}")
        running = [process for process in processes if process.poll() is None]
        if running and time.monotonic() > deadline_s:
            raise LaunchError(
                f"bench: {contender.title} did not end within {_ROUND_TIMEOUT_S / 60:.0f} minutes; "
                f"measure fewer steps with --steps.{log_tails(directory)}"
            )


def end_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs, with all descendants: first politely, then for certain."""
    family = _family({process.pid for process in processes})
    for process in processes:
        if process.poll() is None:
            process.terminate()
    _, stubborn = psutil.wait_procs(family, timeout=_GRACE_S)
    for member in stubborn:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(stubborn)
    for process in processes:
        process.wait()


def _family(leaders: set[int]) -> list[psutil.Process]:
    """Every live process of the leaders' process groups, and all descendants of these."""
    family: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) in leaders and process.status() != psutil.STATUS_ZOMBIE:
                members = [process, *process.children(recursive=True)]
                family.update((member.pid, member) for member in members)
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
    return list(family.values())


def log_tails(directory: Path) -> str:
    """The last lines of each ``process-*.log`` there, for an error's message."""
    tails = ""
    for log in sorted(directory.glob("process-*.log")):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        if lines:
            tails += "\n  " + "\n  ".join([f"The end of what {log.stem} printed:", *lines])
    return tails
