"""Rows: each is a command in a process of its own, with a time limit; one table shows their results.

A user may have the GPU for a quarter of an hour and no second try. So a row that crashes, hangs or
leaves the GPU in a bad state ends itself alone, each result is printed and written as soon as it is there, and a row
that cannot run is in the table with the reason. No torch is imported: this process holds no GPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

DIRECTORY = "PACELINE_GPU_ROW"
"""The variable that names a row's directory to its processes."""

LIMIT = "PACELINE_GPU_ROW_S"
"""The variable that tells them how many seconds they have."""

IS_REAL = "GPU_STAND_IN" not in os.environ
"""Whether this process's GPUs are real, and not the CPU that pretends to be one (``tests/gpu_stand_in``)."""

_OUTCOME, _LOG = "outcome.json", "log.txt"
_POLL_S = 0.05
_GRACE_S = 3.0
_LEAST_S = 5.0
_LOG_LINES = 25

Status = Literal["passed", "FAILED", "TIMED OUT", "not run here", "out of time"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One check or measurement.

    Attributes:
        name: of the row, and of its directory.
        title: what it shows, for people.
        command: exits with 0 if it is so; it may call :func:`report`.
        limit_s: after this time the command and all that it started are killed.
        gpus: how many it needs.
        real: a pretended GPU is not enough.
        alone: nothing else may use the GPU meanwhile.
    """

    name: str
    title: str
    command: Sequence[str]
    limit_s: float
    gpus: int = 1
    real: bool = False
    alone: bool = False


@dataclass(frozen=True)
class Machine:
    """The GPUs and versions that the rows may use.

    Attributes:
        gpus: the name of each.
        real: whether these are GPUs, and not the CPU that pretends to be one.
        facts: versions and sizes, for the report.
    """

    gpus: Sequence[str]
    real: bool
    facts: Mapping[str, str]

    @property
    def title(self) -> str:
        """Such as ``2 x NVIDIA H100 80GB HBM3``."""
        names = sorted(set(self.gpus))
        title = ", ".join(f"{self.gpus.count(name)} x {name}" for name in names)
        return title if self.real else f"{title} (pretended by the CPU)"

    def lacks(self, row: Row) -> str | None:
        """Return what this machine lacks for a row, or None."""
        if row.real and not self.real:
            return "needs a real GPU"
        if row.gpus > len(self.gpus):
            return f"needs {row.gpus} GPUs, of which {len(self.gpus)} {'is' if len(self.gpus) == 1 else 'are'} here"
        return None


@dataclass(frozen=True)
class Outcome:
    """The result of a row.

    Attributes:
        name: the row's.
        title: the row's.
        status: how it ended.
        seconds: how long it took.
        notes: what it measured or why it failed, in words.
        table: headings, then rows; empty without one.
        data: whatever else it measured.
        log: the end of what a row printed that did not pass.
    """

    name: str
    title: str
    status: Status
    seconds: float = 0.0
    notes: Sequence[str] = ()
    table: Sequence[Sequence[str]] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    log: Sequence[str] = ()

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong: it passed, or this machine is not the one for it."""
        return self.status in ("passed", "not run here")


def report(*notes: str, table: Sequence[Sequence[str]] = (), **data: Any) -> None:
    """Called by a row's command: add notes, a table or figures to its outcome. Elsewhere it does nothing."""
    directory = os.environ.get(DIRECTORY)
    if directory is None:
        return
    path = Path(directory) / _OUTCOME
    found = json.loads(path.read_text()) if path.exists() else {"notes": [], "table": [], "data": {}}
    found["notes"] += notes
    found["table"] = list(table) or found["table"]
    found["data"] |= data
    path.with_suffix(".new").write_text(json.dumps(found))
    path.with_suffix(".new").replace(path)


@dataclass
class _Running:
    row: Row
    directory: Path
    process: subprocess.Popen[bytes]
    deadline: float
    started: float = field(default_factory=time.monotonic)

    def outcome(self) -> Outcome | None:
        """Return the result, or None while it runs and may run."""
        code = self.process.poll()
        status: Status = "passed" if code == 0 else "FAILED"
        if code is None:
            if time.monotonic() < self.deadline:
                return None
            status = "TIMED OUT"
        self.end()
        return self._read(status, code)

    def end(self) -> None:
        """End its remaining processes."""
        end(self.process.pid)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=_POLL_S)

    def _read(self, status: Status, code: int | None) -> Outcome:
        found: dict[str, Any] = {}
        with suppress(OSError, ValueError):  # it may have died while it wrote
            found = json.loads((self.directory / _OUTCOME).read_text())
        log = (self.directory / _LOG).read_text(errors="replace").splitlines()
        seconds = time.monotonic() - self.started
        notes = list(found.get("notes", ()))
        if status == "TIMED OUT":
            notes.insert(0, f"killed after {seconds:.0f} s")
        elif status == "FAILED":
            how = f"exit code {code}" if code is None or code > 0 else f"killed by {signal.Signals(-code).name}"
            notes.insert(0, f"{how}: {_cause(log)}")
        return Outcome(
            name=self.row.name,
            title=self.row.title,
            status=status,
            seconds=round(seconds, 1),
            notes=notes,
            table=found.get("table", ()),
            data=found.get("data", {}),
            log=() if status == "passed" else log[-_LOG_LINES:],
        )


def _cause(log: Sequence[str]) -> str:
    """Return the line of a log that most likely says why: pytest's first ``E`` line, else the last one."""
    lines = [line.strip() for line in log if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E  ")]
    return (errors or lines[-1:] or ["it printed nothing"])[0][:300]


def run_rows(
    rows: Sequence[Row],
    machine: Machine,
    directory: Path,
    *,
    jobs: int,
    seconds: float,
    patience: float = 1.0,
    variables: Mapping[str, str],
    on_outcome: Callable[[Outcome], None],
) -> list[Outcome]:
    """Run rows in their order, several at a time, and return the results in the same order.

    Args:
        rows: names differ.
        machine: rows that need another one are not run.
        directory: of the rows' own directories.
        jobs: how many run at a time, but for those that must be alone.
        seconds: no row runs longer than until then; those that could not begin are out of time.
        patience: multiplies the rows' time limits, for a machine without a real GPU.
        variables: for the environment of all.
        on_outcome: called with each outcome as soon as it is known.
    """
    end_of_time = time.monotonic() + seconds
    outcomes: dict[str, Outcome] = {}

    def done(outcome: Outcome) -> None:
        outcomes[outcome.name] = outcome
        on_outcome(outcome)

    waiting = [row for row in rows if machine.lacks(row) is None]
    running: list[_Running] = []
    try:
        while waiting or running:
            for each in [*running]:
                if (outcome := each.outcome()) is not None:
                    running.remove(each)
                    done(outcome)
            while waiting and _may_start(waiting[0], running, jobs):
                row = waiting.pop(0)
                if end_of_time - time.monotonic() < min(_LEAST_S, row.limit_s):
                    done(Outcome(row.name, row.title, "out of time"))
                else:
                    limit_s = min(patience * row.limit_s, end_of_time - time.monotonic())
                    running.append(_start(row, directory / row.name, limit_s, variables))
            time.sleep(_POLL_S)
    finally:
        for each in running:
            each.end()
    for row in rows:
        if (lacks := machine.lacks(row)) is not None:
            done(Outcome(row.name, row.title, "not run here", notes=[lacks]))
    return [outcomes[row.name] for row in rows]


def _may_start(row: Row, running: Sequence[_Running], jobs: int) -> bool:
    return not running or (len(running) < jobs and not row.alone and not running[0].row.alone)


def _start(row: Row, directory: Path, limit_s: float, variables: Mapping[str, str]) -> _Running:
    directory.mkdir(parents=True)
    with (directory / _LOG).open("wb") as log:
        process = subprocess.Popen(
            row.command,
            env={**os.environ, **variables, DIRECTORY: str(directory), LIMIT: str(limit_s)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is for us alone
        )
    return _Running(row, directory, process, time.monotonic() + limit_s)


def end(pid: int) -> None:
    """End the remaining processes of a row: its session, and the descendants of its processes.

    A process that the kernel cannot end, such as one in a driver that hangs, is left behind.
    """
    left: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if os.getsid(process.pid) == pid or process.pid == pid:
                left |= {each.pid: each for each in (process, *process.children(recursive=True))}
    for send in (psutil.Process.terminate, psutil.Process.kill):
        for process in left.values():
            with suppress(psutil.Error):
                send(process)
        _, alive = psutil.wait_procs(list(left.values()), timeout=_GRACE_S)
        left = {each.pid: each for each in alive}


# --- the table, for a terminal, a document and machines ---


def line_of(outcome: Outcome) -> str:
    """Return an outcome as lines of the table on a terminal."""
    head = f"{outcome.status:<13}{outcome.name:<22}{outcome.seconds:>6.1f} s  {outcome.title}"
    below = [f"{'':45}{note}" for note in outcome.notes]
    if outcome.table:
        widths = [max(len(row[column]) for row in outcome.table) for column in range(len(outcome.table[0]))]
        for first, *others in outcome.table:
            cells = [f"{text:>{width}}" for text, width in zip(others, widths[1:], strict=True)]
            below.append(f"    {first:<{widths[0]}}  {'  '.join(cells)}")
    return "\n".join([head, *below, *(f"    | {line}" for line in outcome.log)])


def summary_of(outcomes: Sequence[Outcome]) -> str:
    """Return how many rows ended how: ``17 passed, 1 FAILED, 3 not run here``."""
    statuses = [outcome.status for outcome in outcomes]
    return ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))


def as_json(command: str, machine: Machine, outcomes: Sequence[Outcome], date: str) -> str:
    """Return everything; :func:`from_json` reads it."""
    document = {
        "command": command,
        "date": date,
        "machine": dataclasses.asdict(machine),
        "rows": [dataclasses.asdict(outcome) for outcome in outcomes],
    }
    return json.dumps(document, indent=1)


def from_json(text: str) -> tuple[str, Machine, list[Outcome], str]:
    """Return the command, the machine, the outcomes and the date."""
    document = json.loads(text)
    outcomes = [Outcome(**row) for row in document["rows"]]
    return document["command"], Machine(**document["machine"]), outcomes, document["date"]


def as_markdown(machine: Machine, outcomes: Sequence[Outcome], date: str) -> str:
    """Return the section of a document, without its heading; its first line is the summary."""
    facts = ", ".join(f"{name} {value}" for name, value in machine.facts.items())
    lines = [f"{date}: {summary_of(outcomes)}.", "", f"{machine.title}; {facts}.", ""]
    lines += ["| | What | Seconds | Result |", "|---|---|--:|---|"]
    for outcome in outcomes:
        result = "; ".join([outcome.status, *outcome.notes]).replace("|", "\\|")
        lines.append(f"| `{outcome.name}` | {outcome.title} | {outcome.seconds:.0f} | {result} |")
    for outcome in outcomes:
        if outcome.table:
            headings, *rows = outcome.table
            lines += ["", f"| {' | '.join(headings)} |", f"|---|{'--:|' * (len(headings) - 1)}"]
            lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)
