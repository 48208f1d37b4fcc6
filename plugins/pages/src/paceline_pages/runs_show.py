"""``paceline runs show RUN``: a run's timeline and the time that faults cost."""

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

_MAX_MODULES = 10
_STYLES = {"fault": "red", "failed": "red", "fallback": "yellow", "stopped": "yellow", "finished": "green"}


def show(run: Path, *, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Show a run's timeline and goodput: the share of its time spent in steps that count.

    The timeline contains every fault, group of workers, join, leave, save, stop and restart. The run may be
    finished, crashed or still active.

    Args:
        run: The run's directory.
        json: Print one JSON object instead.
    """
    directory = RunDirectory(run)
    if not directory.events.exists():
        directory.read_manifest()  # raises an error that names the missing file, if this is not a run
        raise RunDirectoryError(f"{directory.events} is missing, so the run has no timeline.")
    try:
        history = timeline(directory.read_events(), until=_alive_at(directory), repeated_steps=_repeated(directory))
    except (KeyError, TypeError, ValueError) as error:
        raise RunDirectoryError(f"{directory.events} is damaged: {error!r}.") from error
    drift = (directory.read_result() or {}).get("drift")
    if json:
        goodput = history.goodput
        numbers = {"share": goodput.share, "good_s": round(goodput.good_s, 3), **dataclasses.asdict(goodput)}
        document = {**dataclasses.asdict(history), "goodput": numbers, **({} if drift is None else {"drift": drift})}
        print(json_module.dumps(document))
    else:
        _print(directory, history)
        if drift is not None:
            _print_drift(directory, drift)
    return 0


def _alive_at(directory: RunDirectory) -> float | None:
    """Return the time of the run's last sign of life that is not an event."""
    if directory.is_running():
        return time.time()
    return directory.metrics.stat().st_mtime if directory.metrics.exists() else None


def _repeated(directory: RunDirectory) -> int:
    from paceline.data.ledger import read_ledger

    try:
        return sum(not is_final for _, is_final in read_ledger(directory.ledger).entries())
    except RunDirectoryError:
        return 0  # no ledger yet; `paceline audit` reports what is wrong with a damaged one


def _print(directory: RunDirectory, history: Timeline) -> None:
    from rich.text import Text

    from paceline.core.output import ListTable, wide_console

    console = wide_console()
    table = ListTable(">time", ">step", "event", folds=("event",))
    for entry in history.entries:
        step = "" if entry.step is None else f"{entry.step:,}"
        table.add(_clock(entry.seconds), step, Text(entry.text, style=_STYLES.get(entry.event, "")))
    console.print(table)
    console.print(_verdict(history.goodput), soft_wrap=True)
    for cause, seconds in sorted(history.goodput.lost_s.items(), key=lambda item: -item[1]):
        number = history.goodput.repeated_steps if cause == REPEATED else history.goodput.interruptions[cause]
        console.print(f"  {seconds:8.2f} s  {cause} ({number:,})", style="dim")


def _print_drift(directory: RunDirectory, drift: Mapping[str, Any]) -> None:
    from rich.markup import escape

    from paceline.core.output import Console

    console = Console(highlight=False)
    parent = directory.read_manifest().get("parent", {})
    run = f" (run {parent['run']}, step {parent.get('step')})" if "run" in parent else ""
    console.print(escape(f"Initialised from {parent.get('source')}{run}."), soft_wrap=True)
    if "problem" in drift:
        console.print(escape(f"The distance from the parent is unknown: {drift['problem']}"), soft_wrap=True)
        return
    sizes = [(module, size) for module, size in drift["modules"].items() if size]
    moved = sorted(sizes, key=lambda item: -item[1])
    num_unmoved = len(drift["modules"]) - len(moved)
    facts = [f"Its weights moved by {_percent(drift['relative_l2'])} of their 2-norm"]
    if drift["agreement"] is not None:
        facts.append(f"both predict the same for {drift['agreement']:.1%} of {drift['samples']:,} test samples")
    if drift["new"]:
        facts.append(f"newly initialised: {', '.join(drift['new'])}")
    console.print(escape("; ".join(facts)) + ".", soft_wrap=True)
    for module, size in moved[:_MAX_MODULES]:
        console.print(escape(f"  {_percent(size):>8}  {module or '(the model itself)'}"), style="dim")
    rest = [f"{len(moved) - _MAX_MODULES} more moved less"] if len(moved) > _MAX_MODULES else []
    rest += [f"{num_unmoved} did not move"] if num_unmoved else []
    if rest:
        console.print(f"            {', '.join(rest)}", style="dim")


def _percent(share: float | None) -> str:
    return "any amount" if share is None else f"{share:.2%}"


def _verdict(goodput: Goodput) -> str:
    if goodput.share is None:
        return "No step has been trained yet."
    lost = goodput.active_s - goodput.good_s
    return (
        f"Goodput {goodput.share:.1%}: of {goodput.active_s:,.1f} active seconds, {goodput.good_s:,.1f} s went "
        f"into steps that count{f', {lost:,.1f} s were lost:' if goodput.lost_s else '.'}"
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}:{minutes:02d}:{rest:06.3f}" if hours else f"{minutes}:{rest:06.3f}"
