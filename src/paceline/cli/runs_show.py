"""``paceline runs show RUN``: what happened in a run, and what it cost."""

from __future__ import annotations

import dataclasses
import json as json_module
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from paceline.core.errors import RunDirectoryError
from paceline.runs.directory import RunDirectory
from paceline.runs.timeline import REPEATED, timeline

if TYPE_CHECKING:
    from paceline.runs.timeline import Goodput, Timeline

_PIPE_COLUMNS = 250
_MOST_MODULES = 10
_STYLES = {"fault": "red", "failed": "red", "fallback": "yellow", "stopped": "yellow", "finished": "green"}


def show(run: Path, *, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Show a run's timeline and goodput: the share of its time that went into steps that count.

    The timeline has every fault, every view of the workers that formed, who joined and left, every save,
    stop and restart. The run may be finished, crashed or still at work.

    Parameters
    ----------
    run
        The run's directory.
    json
        Print one JSON object instead.
    """
    directory = RunDirectory(run)
    if not directory.events.exists():
        directory.read_manifest()  # says what is missing, if this is no run
        raise RunDirectoryError(f"{directory.events} is missing: nothing is known of what happened.")
    try:
        read = timeline(directory.read_events(), until=_alive_at(directory), repeated_steps=_repeated(directory))
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(f"{directory.events} is damaged: {error!r}.") from error
    drift = (directory.read_result() or {}).get("drift")
    if json:
        print(json_module.dumps({**as_json(read), **({} if drift is None else {"drift": drift})}))
    else:
        _print(directory, read)
        if drift is not None:
            _print_drift(directory, drift)
    return 0


def as_json(read: Timeline) -> dict[str, Any]:
    """The timeline as JSON types."""
    goodput = read.goodput
    return {
        "entries": [dataclasses.asdict(entry) for entry in read.entries],
        "interruptions": [dataclasses.asdict(interruption) for interruption in read.interruptions],
        "goodput": {
            "share": goodput.share,
            "good_s": round(goodput.good_s, 3),
            **dataclasses.asdict(goodput),
        },
    }


def _alive_at(directory: RunDirectory) -> float | None:
    """When the run was last seen alive, beyond its events."""
    if directory.is_running():
        return time.time()
    return directory.metrics.stat().st_mtime if directory.metrics.exists() else None


def _repeated(directory: RunDirectory) -> int:
    from paceline.data.ledger import read_ledger

    try:
        return sum(not is_final for _, is_final in read_ledger(directory.ledger).entries())
    except RunDirectoryError:
        return 0  # none yet; `paceline audit` says what is wrong with one


def _print(directory: RunDirectory, read: Timeline) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPE_COLUMNS)
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("what happened")
    for entry in read.entries:
        step = "" if entry.step is None else f"{entry.step:,}"
        table.add_row(_clock(entry.seconds), step, Text(entry.text, style=_STYLES.get(entry.event, "")))
    console.print(table)
    console.print(_verdict(read.goodput), soft_wrap=True)
    for cause, seconds in sorted(read.goodput.lost_s.items(), key=lambda item: -item[1]):
        number = read.goodput.repeated_steps if cause == REPEATED else read.goodput.interruptions[cause]
        console.print(f"  {seconds:8.2f} s  {cause} ({number:,})", style="dim")


def _print_drift(directory: RunDirectory, drift: Mapping[str, Any]) -> None:
    """How far a fine-tuned model went from its parent."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    parent = directory.read_manifest().get("parent", {})
    console.print(
        escape(f"Began with {parent.get('source')} (run {parent.get('run')}, step {parent.get('step')})."),
        soft_wrap=True,
    )
    if "problem" in drift:
        console.print(escape(f"How far it went is not known: {drift['problem']}"), soft_wrap=True)
        return
    moved = sorted(
        ((module, size) for module, size in drift["modules"].items() if size),
        key=lambda item: -item[1],
    )
    still = len(drift["modules"]) - len(moved)
    words = [f"Its weights moved by {_percent(drift['relative_l2'])} of their 2-norm"]
    if drift["agreement"] is not None:
        words.append(f"both predict the same for {drift['agreement']:.1%} of {drift['samples']:,} test samples")
    if drift["new"]:
        words.append(f"began anew: {', '.join(drift['new'])}")
    console.print(escape("; ".join(words)) + ".", soft_wrap=True)
    for module, size in moved[:_MOST_MODULES]:
        console.print(escape(f"  {_percent(size):>8}  {module or '(the model itself)'}"), style="dim")
    rest = [f"{len(moved) - _MOST_MODULES} more moved less"] if len(moved) > _MOST_MODULES else []
    rest += [f"{still} did not move"] if still else []
    if rest:
        console.print(f"            {', '.join(rest)}", style="dim")


def _percent(share: float | None) -> str:
    return "any amount" if share is None else f"{share:.2%}"


def _verdict(goodput: Goodput) -> str:
    if goodput.share is None:
        return "No step has been trained yet."
    lost = goodput.active_s - goodput.good_s
    return (
        f"Goodput {goodput.share:.1%}: of {goodput.active_s:,.1f} s at work, {goodput.good_s:,.1f} s went "
        f"into steps that count{f', {lost:,.1f} s were lost:' if goodput.lost_s else '.'}"
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02d}:{rest:06.3f}" if hours else f"{minutes}:{rest:06.3f}"
