"""The ``paceline`` command: one file a command, imported when it is used."""

from __future__ import annotations

import sys

from cyclopts import App

from paceline import __version__
from paceline.errors import PacelineError

app = App(
    name="paceline",
    help="Exact, reproducible distributed training on PyTorch.",
    version=__version__,
    result_action="return_value",
)
_COMMANDS = {
    "train": ("train:train", "Train a task, on one process or several."),
    "resume": ("train:resume", "Continue a run at its exact next sample."),
    "runs": ("runs:runs", "List runs, with state and results."),
    "logs": ("logs:logs", "Show what each rank of a run printed."),
    "audit": ("audit:audit", "Prove from a run's ledger that every sample was seen exactly once."),
    "bench": ("bench:app", "Measure Paceline beside a hand-written loop and its peers."),
    "version": ("version:version", "Print the versions of Paceline and of what it builds on."),
}
for _name, (_place, _help) in _COMMANDS.items():
    app.command(f"paceline.cli.{_place}", name=_name, help=_help)


def main() -> int:
    """Run the command line; return the exit code."""
    try:
        code = app()
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return code if isinstance(code, int) else 0
