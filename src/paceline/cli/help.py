"""``--help`` shows the common options; ``--help-all`` shows every option."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from attrs import evolve
from cyclopts.help import HelpEntry, HelpPanel, InlineText
from cyclopts.help.formatters import DefaultFormatter
from cyclopts.help.specs import ColumnSpec, get_default_command_columns
from rich.text import Text

from paceline.core.built_in import COMMANDS, TASK_PREFIXES

if TYPE_CHECKING:
    from cyclopts import App
    from rich.console import Console, ConsoleOptions

_WITHOUT_GROUP = "Parameters"
"""cyclopts' name for the group of all options without one."""

_LOCAL_LAUNCHERS = ("auto", "inprocess", "embedded", "spawn", "torchrun")
"""Values of ``--on`` with few options of their own, which ``--help`` shows below the common ones."""

_JOBS = ("train", "resume", "launch")
_LONGEST_COMMAND = len("checkpoint")
_EMPTY_DEFAULTS = ("False", "()", '""')


def print_help(app: App, words: Sequence[str], *, everything: bool) -> None:
    """Print the help of the command that ``words`` name, with all groups of options if ``everything``."""
    formatter = _Formatter(words, everything=everything)
    app.help_formatter = formatter
    app.help_print(list(words))
    for word in words[1:]:
        prefix, colon, _ = word.partition(":")
        if colon and prefix in TASK_PREFIXES:
            app.console.print("", Text(_flags_of(prefix)), sep="\n")
    closing = formatter.closing
    if closing:
        app.console.print("", Text(closing), sep="\n")


def _flags_of(prefix: str) -> str:
    """Return the flags of tasks such as ``hf:MODEL``, a line each."""
    task = TASK_PREFIXES[prefix]
    lines = [f"Options of {prefix}:{task.field.upper()}:"]
    for name, (value, text) in task.flags.items():
        lines.append(f"  {'--' + name.replace('_', '-') + ' ' + value:<21} {text}")
    return "\n".join(lines)


class _Formatter(DefaultFormatter):
    """Prints the first groups of options, and notes the names of the others."""

    def __init__(self, words: Sequence[str], *, everything: bool) -> None:
        self._command = " ".join(words[:1])
        super().__init__(column_specs=None if self._command else _command_columns)
        self._everything = everything
        self._hidden_groups: set[str] = set()
        self._launcher = ""
        self._omitted: list[str] = []
        if self._command:
            self._choose(_value_of_on(words))

    def _choose(self, on: str | None) -> None:
        # Imported here because the list of all commands needs no options.
        from paceline.cli.options import COMMON, GROUPS

        self._hidden_groups = {*GROUPS}
        has_system = on is not None and on not in _LOCAL_LAUNCHERS
        if has_system:
            # A cluster's options take the place of the common ones: both do not fit two screens.
            self._hidden_groups |= {_WITHOUT_GROUP, COMMON}
        if self._command == "launch" or (has_system and self._command in _JOBS):
            self._hidden_groups.remove("Job")
        self._launcher = f"--on {on}"

    @property
    def closing(self) -> str:
        """Return the line below all groups, which names the omitted groups and how to see them."""
        if not self._command:
            return "paceline COMMAND --help shows the common options, --help-all every option."
        if not self._omitted:
            return ""
        names = [name for name in self._omitted if not name.startswith("--on ")]
        if len(names) < len(self._omitted):
            names.append(f"--on NAME (paceline {self._command} --on NAME --help)")
        is_train = COMMANDS[self._command].takes_run_options
        label = "Options of paceline train" if is_train else "More options"
        return f"{label}, shown by --help-all: {', '.join(names)}."

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        if not panel.entries:
            return
        title = str(panel.title)
        belongs_to_other_launcher = title.startswith("--on ") and title != self._launcher
        if (title in self._hidden_groups or belongs_to_other_launcher) and not self._everything:
            self._omitted.append(title)
            return
        super().__call__(console, options, panel.copy(entries=[_tidy(entry) for entry in panel.entries]))


def _command_columns(console: Console, options: ConsoleOptions, entries: list[HelpEntry]) -> tuple[ColumnSpec, ...]:
    """Return the columns of a list of commands, with the same width in every group."""
    name, *rest = get_default_command_columns(console, options, entries)
    return evolve(name, min_width=_LONGEST_COMMAND), *rest


def _tidy(entry: HelpEntry) -> HelpEntry:
    """Return the entry without a docstring's line breaks and without an empty default."""
    description = entry.description
    if isinstance(description, InlineText) and isinstance(description.primary_renderable, Text):
        description = InlineText(Text(" ".join(description.primary_renderable.plain.split())))
    default = None if entry.default in _EMPTY_DEFAULTS else entry.default
    return evolve(entry, description=description, default=default)


def _value_of_on(words: Sequence[str]) -> str | None:
    """Return the value of ``--on``, or None if it is not given."""
    values = [word.removeprefix("--on=") for word in words if word.startswith("--on=")]
    return values[0] if values else dict(pairwise(words)).get("--on")
