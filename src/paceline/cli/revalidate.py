"""``paceline revalidate RUN|PACKAGE``: recompute recorded metrics with the installed libraries."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.core.errors import ConfigError
from paceline.runs.directory import RunDirectory
from paceline.runs.package_manifest import MANIFEST

if TYPE_CHECKING:
    from paceline.insight.revalidate import Program, Revalidation

_WORDS = {
    "same": "bitwise equal",
    "rounding": "equal within rounding",
    "tolerated": "within --tolerance",
    "differs": "differs",
}
_STYLES = {"differs": "bold red", "tolerated": "yellow"}


def revalidate(
    subject: Path,
    *,
    task: str | None = None,
    tolerance: float = 0.0,
    trust: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Check whether the recorded metrics of a run or package hold with the installed libraries.

    Evaluates a run's model on each split that the run recorded. Evaluates a package's model on the split of
    its export, and compares its programs with its weights. The exit code is 0 if all metrics hold: bitwise,
    within rounding of float32, or within --tolerance; and 1 if one does not, or if the weights have changed.
    A package that does not verify is refused.

    Parameters
    ----------
    subject
        The run's directory; or a package's directory, NAME@TAG, NAME, or the beginning of a digest.
    task
        Check a package with this task's code. Default: the package's own task, if you trust the package.
        Programs that you do not trust are not run.
    tolerance
        Largest accepted absolute difference.
    trust
        Trust the package's program and task from now on; both can run code.
    json
        Print the results as one line of JSON.
    """
    if not tolerance >= 0:
        raise ConfigError(f"--tolerance must be at least 0, but is {tolerance}.")
    directory = RunDirectory(subject)
    is_run = directory.exists() or (subject.is_dir() and not (subject / MANIFEST).is_file())
    if is_run:
        if task is not None or trust:
            raise ConfigError(f"--task and --trust are for packages, but {subject} is a run.")
        result = _revalidate_run(directory, tolerance, quiet=json)
    else:
        result = _revalidate_package(str(subject), task, tolerance, trust=trust, quiet=json)
    if json:
        print(json_module.dumps(result.as_json()))
    else:
        _print(result, subject)
    return 0 if result.holds else 1


def _revalidate_run(directory: RunDirectory, tolerance: float, *, quiet: bool) -> Revalidation:
    directory.read_complete_manifest()
    # Imported here so that --help does not wait for torch.
    from paceline.insight.revalidate import revalidate

    with _progress(quiet) as on_progress:
        return revalidate(directory, tolerance=tolerance, on_progress=on_progress)


def _revalidate_package(
    package_name: str, task: str | None, tolerance: float, *, trust: bool, quiet: bool
) -> Revalidation:
    from paceline.runs.package import open_package
    from paceline.runs.package import trust as trust_digest

    package = open_package(package_name)
    if trust:
        trust_digest(package.digest)
    from paceline.insight.revalidate import revalidate_package

    with _progress(quiet) as on_progress:
        return revalidate_package(package, task, tolerance=tolerance, on_progress=on_progress)


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on a terminal, counted in samples."""
    if quiet or not sys.stderr.isatty():
        yield lambda split, done, total: None
        return
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from paceline.core.rich_console import Console

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading", total=None)
        yield lambda split, done, total: progress.update(
            task, description=escape(f"evaluating {split}"), completed=done, total=total
        )


def _print(result: Revalidation, subject: Path) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from paceline.core.rich_console import Console

    console = Console(highlight=False)
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in ("metric", "recorded", "now", "difference", ""):
        table.add_column(name, justify="left" if name in ("metric", "") else "right")
    for number in result.numbers:
        difference = number.difference
        cells = (
            f"{number.split}.{number.name}",
            _format(number.recorded),
            _format(number.now),
            "" if not difference else f"{difference:+.3g}",
            _WORDS[number.finding],
        )
        table.add_row(*map(Text, cells), style=_STYLES.get(number.finding))
    console.print(table)
    if result.weights_hold is not None:
        weights = "are" if result.weights_hold else "are not"
        style = "" if result.weights_hold else "bold red"
        console.print(f"The model's weights {weights} equal to the recorded ones.", style=style)
    for program in result.programs:
        console.print(Text(_describe_program(program)), style="bold red" if program.problem else "", soft_wrap=True)
    changed = [f"{n}: {result.then[n]} recorded, {v} now" for n, v in result.now.items() if result.then.get(n, v) != v]
    same = ", ".join(f"{name} {value}" for name, value in result.now.items())
    console.print(Text("; ".join(changed) or f"Versions are unchanged: {same}."), soft_wrap=True)
    for change in result.changed_numerics:
        console.print(Text(change.replace("in the checkpoint", "recorded")), soft_wrap=True)
    wrong = sum(number.finding == "differs" for number in result.numbers)
    if result.holds:
        verdict = f"{subject} holds: {len(result.numbers)} metrics of the model after step {result.step:,}."
    else:
        verdict = f"{subject} does not hold: {wrong} of {len(result.numbers)} metrics differ"
        broken = sum(program.problem is not None for program in result.programs)
        verdict += f", {broken} of {len(result.programs)} programs." if result.programs else "."
    console.print(Text(verdict, style="green" if result.holds else "bold red"), soft_wrap=True)


def _describe_program(program: Program) -> str:
    if program.problem is not None:
        return f"The {program.format} program does not hold: {program.problem}."
    if program.now is None:
        return f"The {program.format} program was not run: it is not trusted."
    then = "" if program.then is None else f"; {program.then:.3g} at the export"
    return f"The {program.format} program differs from the weights by at most {program.now:.3g}{then}."


def _format(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"
