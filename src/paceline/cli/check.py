"""``paceline check RUN``."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.errors import ConfigError
from paceline.run_directory import RunDirectory

if TYPE_CHECKING:
    from paceline.reporting.recheck import Recheck

_WORDS = {
    "same": "the same, to the last bit",
    "rounding": "the same within rounding",
    "tolerated": "within --tolerance",
    "differs": "differs",
}
_STYLES = {"differs": "bold red", "tolerated": "yellow"}


def check(
    run: Path,
    *,
    tolerance: float = 0.0,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Say whether a run's recorded numbers still hold, under the libraries and on the machine of now.

    The model that they are of is evaluated again on each split. The exit code is 0 if all of them hold: to
    the last bit, within rounding of float32, or within --tolerance; and 1 if one does not, or the weights
    have changed.

    Parameters
    ----------
    run
        The run's directory.
    tolerance
        The absolute difference of a number that still holds.
    json
        Print the findings as one line of JSON.
    """
    if not tolerance >= 0:
        raise ConfigError(f"--tolerance must be at least 0, but is {tolerance}.")
    directory = RunDirectory(run)
    directory.read_complete_manifest()
    # Only here, so that --help need not wait for torch.
    from paceline.reporting.recheck import recheck

    with _progress(json) as on_progress:
        found = recheck(directory, tolerance=tolerance, on_progress=on_progress)
    if json:
        print(json_module.dumps(found.as_json()))
    else:
        _print(found, run)
    return 0 if found.holds else 1


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal, by samples."""
    if quiet or not sys.stderr.isatty():
        yield lambda split, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading", total=None)
        yield lambda split, done, total: progress.update(
            task, description=f"evaluating {split}", completed=done, total=total
        )


def _print(found: Recheck, run: Path) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in ("number", "then", "now", "difference", ""):
        table.add_column(name, justify="left" if name in ("number", "") else "right")
    for number in found.numbers:
        difference = number.difference
        cells = (
            f"{number.split}.{number.name}",
            _shown(number.recorded),
            _shown(number.now),
            "" if not difference else f"{difference:+.3g}",
            _WORDS[number.finding],
        )
        table.add_row(*map(Text, cells), style=_STYLES.get(number.finding))
    console.print(table)
    if found.weights_hold is not None:
        weights = "are" if found.weights_hold else "are not"
        style = "" if found.weights_hold else "bold red"
        console.print(f"The last model's weights {weights} those that the run recorded.", style=style)
    changed = [
        f"{n}: {found.then[n]} then, {v} now" for n, v in found.now.items() if found.then.get(n, v) != v
    ]
    same = ", ".join(f"{name} {value}" for name, value in found.now.items())
    console.print(Text("; ".join(changed) or f"Versions then and now: {same}."), soft_wrap=True)
    for pin in found.changed_pins:
        console.print(Text(pin.replace("in the checkpoint", "then")), soft_wrap=True)
    wrong = sum(number.finding == "differs" for number in found.numbers)
    if found.holds:
        verdict = f"{run} holds: {len(found.numbers)} numbers, of the model after step {found.step:,}."
    else:
        verdict = f"{run} does not hold: {wrong} of {len(found.numbers)} numbers differ."
    console.print(Text(verdict, style="green" if found.holds else "bold red"), soft_wrap=True)


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"
