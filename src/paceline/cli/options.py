"""Options of a run, of a job and of launchers: as command-line flags, derived from where they are defined, and their
defaults in files.
"""

from __future__ import annotations

import dataclasses
import functools
import json as json_module
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from paceline.core.config import all_options, check_keys
from paceline.core.errors import ConfigError
from paceline.core.files import parse_toml, user_directory
from paceline.core.options import flag
from paceline.core.plugins import plugin_names
from paceline.launch.launcher import (
    LAUNCHER_NAMES,
    JobOptions,
    installed_launchers,
    option_names,
    option_types,
    options_type,
    own_flags,
)

ARGUMENTS, COMMON = "Arguments", "Common"
GROUPS = (
    *("Task", "Training", "Data", "Evaluation", "Run directory and checkpoints", "Output"),
    *("Processes", "Parallelism", "Recovery", "Memory", "Fine-tuning", "Job"),
    *("FSDP", "Tensor", "Pipeline", "Parameter server", "Local SGD and compression"),
    *("DataParallel", "DeepSpeed"),
    *("Requests", "Replicas", "Program", "Swap"),
)
"""The groups that ``--help`` omits, in the order of ``--help-all``: a run's, then a server's, then the launchers'."""

COMMON_OF_TRAIN = (
    *("set", "epochs", "max_steps", "global_batch_size", "precision", "seed"),
    *("nproc", "nodes", "on", "strategy", "device", "checkpoint_every"),
)
"""The most used options, in the order of ``paceline train --help``; the command adds three."""

_NOT_FLAGS = ("task", "run_dir")


@functools.cache
def group(name: str, index: int = 0) -> Group:
    """Return the group of options with that name, sorted by ``index`` among those that only one command has."""
    if name == ARGUMENTS:
        return Group.create_default_arguments(name)
    if name == COMMON:
        order = 0
    elif name in GROUPS:
        order = 2 + GROUPS.index(name)
    else:
        order = 2 + len(GROUPS) if name.startswith("--on ") else 1
    return Group(name, sort_key=(order, index))


@functools.cache
def run_options(*, without: tuple[str, ...] = (), common: tuple[str, ...] = ()) -> Any:
    """Return a dataclass with a flag for each option of a run; None means not given.

    Args:
        without: options to leave out.
        common: options that the command's ``--help`` shows, in this order.
    """
    order = {name: index for index, name in enumerate(common)}
    fields = []
    for name, its in sorted(all_options().items(), key=lambda item: order.get(item[0], len(order))):
        if name in (*_NOT_FLAGS, *without):
            continue
        help_text = its.help
        if its.default is not None and its.default is not False and its.default != ():
            shown = " ".join(its.default) if isinstance(its.default, tuple) else its.default
            help_text += f" [default: {shown}]"
        panel = group(COMMON if name in order else its.group)
        parameter = Parameter(help=help_text, group=panel, show_default=False, negative="")
        fields.append((name, Annotated[its.type | None, parameter], dataclasses.field(default=None)))
    return options_class("Options", fields)


def options_class(name: str, fields: list[tuple[str, Any, Any]]) -> Any:
    """Make a dataclass of options, without the methods that it does not need: each takes time."""
    namespace = {"__module__": __name__, "__doc__": "Explicit options; None means not given."}
    return dataclasses.make_dataclass(name, fields, kw_only=True, repr=False, eq=False, namespace=namespace)


def explicit_options(options: Any) -> dict[str, Any]:
    """Return the options given on the command line that differ from their default."""
    if options is None:
        return {}
    values = {f.name: (getattr(options, f.name), f.default) for f in dataclasses.fields(options)}
    return {name: value for name, (value, default) in values.items() if value != default}


# --- Options of a job, and of launchers, in one group for each launcher ---


@functools.cache
def job_options() -> Any:
    """Return a dataclass with a flag for each option of a job; None means not given."""
    types, fields = option_types(JobOptions), []
    for f in dataclasses.fields(JobOptions):
        parameter = Parameter(help=f.metadata["help"], group=group("Job"), show_default=False, negative="")
        fields.append((f.name, Annotated[types[f.name] | None, parameter], dataclasses.field(default=None)))
    return options_class("JobFlags", fields)


@functools.cache
def launchers_options(*, for_tasks: bool = False) -> Any:
    """Return a dataclass with a flag for each option of the relevant launchers; None means not given.

    Args:
        for_tasks: leave out options that every task has too.
    """
    helps: dict[str, tuple[str, list[str]]] = {}
    types: dict[str, Any] = {}
    for name in relevant_launchers(sys.argv):
        its = options_type(name)
        if its is None:
            continue
        types |= option_types(its)
        for f in dataclasses.fields(its):
            text, owners = helps.setdefault(f.name, (f.metadata["help"], []))
            owners.append(name)
    fields = []
    for name, (text, owners) in helps.items():
        if for_tasks and name in all_options():
            continue
        parameter = Parameter(help=text, group=group(f"--on {', '.join(owners)}"), show_default=False, negative="")
        fields.append((name, Annotated[types[name] | None, parameter], dataclasses.field(default=None)))
    return options_class("LauncherOptions", fields)


def relevant_launchers(argv: Sequence[str]) -> Sequence[str]:
    """Return the launchers whose options a command line may contain, since importing all of them is slow.

    These are the launcher of ``--on``, or else those that start processes on this machine. Outside of the
    command line, such as in the documentation, they are all of Paceline's own launchers that are installed.
    """
    if Path(argv[0]).name not in ("paceline", "__main__.py"):
        return installed_launchers()
    words = [word for word in argv[1:] if word.startswith("--on=")]
    named = words[0].removeprefix("--on=") if words else dict(pairwise(argv)).get("--on")
    which = installed_launchers() if "--config" in argv else ()  # a file may name any
    ours = tuple(name for name in LAUNCHER_NAMES if name == named or name in which)
    is_named = named is not None and named not in LAUNCHER_NAMES
    plugins = tuple(name for name in plugin_names("paceline.launchers") if name == named) if is_named else ()
    return (*ours, *plugins) or ("spawn", "torchrun")


# --- The defaults of a site, a user and a project: files that save typing the same options with each command ---
#
# A file has the table ``[run]`` with options of ``paceline train``, ``[job]`` with those of a job on any launcher, and
# one for each launcher, such as ``[slurm]``. A later file takes precedence over an earlier one, ``--config`` over all
# of them, and the command line over that. A run that exists keeps what its ``run.toml`` records.


_TYPED = ("task", "set", "run_dir", "resume", "on", "nproc", "nodes")
"""What a run is: no file may decide it for a command that does not name it."""


@dataclass(frozen=True)
class FileDefault:
    """A value that a file gives to an option."""

    value: Any
    file: Path


@dataclass(frozen=True)
class FileDefaults:
    """The defaults that hold for a command.

    Attributes:
        tables: by table and option.
    """

    tables: Mapping[str, Mapping[str, FileDefault]]

    def values(self, table: str) -> dict[str, Any]:
        """Return the values of a table's options."""
        return {name: default.value for name, default in self.tables.get(table, {}).items()}

    def run_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return options of a run: the given ones, and the defaults that do not contradict them."""
        known, defaults = all_options(), self.values("run")
        for name in list(defaults):
            if known[name].replaces in given or any(known[other].replaces == name for other in given):
                del defaults[name]  # such as epochs, where max_steps is given
        return {**defaults, **given}

    def job_options(self, flags: Any) -> JobOptions:
        """Return the options of a job, with those of the command line in place of the defaults."""
        for name, default in self.tables.get("job", {}).items():
            _check_type(name, default, JobOptions)
        return JobOptions(**{**self.values("job"), **explicit_options(flags)})

    def launcher_options(self, launcher: str, flags: Any) -> dict[str, Any]:
        """Return the options of a launcher, with those of the command line in place of the defaults.

        Raises:
            ConfigError: a file has an option that this launcher has not.
        """
        for name, default in self.tables.get(launcher, {}).items():
            if name not in option_names(launcher):
                raise ConfigError(
                    f"{default.file}: {flag(name)} is not an option of --on {launcher}, which takes: "
                    f"{own_flags(launcher)}."
                )
            _check_type(name, default, options_type(launcher))
        return {**self.values(launcher), **explicit_options(flags)}

    def print_used(self, table: str, options: Mapping[str, Any]) -> None:
        """Print which of these options of a table come from which file, as comments."""
        for name, default in self.tables.get(table, {}).items():
            if options.get(name) == default.value:
                print(f"# {flag(name)} {_as_word(default.value)}: {default.file}")


def _check_type(name: str, default: FileDefault, owner: type | None) -> None:
    import msgspec

    assert owner is not None, "which has the option"
    try:
        msgspec.convert(default.value, option_types(owner)[name])
    except msgspec.ValidationError as error:
        example = ', such as ["a", "b"]' if "array" in str(error) else ""
        raise ConfigError(f"{default.file}: {name} = {default.value!r}: {str(error).lower()}{example}.") from error


def read_defaults(task: str | None = None) -> FileDefaults:
    """Read the files that there are.

    Args:
        task: as on the command line; the project's file is next to its file, else in this directory.

    Raises:
        ConfigError: a file cannot be read, or has an option that there is not, or that must be typed.
    """
    file = Path((task or "").rpartition(":")[0])
    project = (file.parent if file.suffix == ".py" else Path()) / "paceline.toml"
    user = user_directory("config") / "config.toml"
    tables: dict[str, dict[str, FileDefault]] = {}
    named = os.environ.get("PACELINE_SITE_CONFIG")
    if named and not Path(named).exists():
        raise ConfigError(f"PACELINE_SITE_CONFIG names {named}, and there is no such file.")
    for path in (Path(named or "/etc/paceline.toml"), user, project):
        for table, options in _read(path, is_project=path == project).items():
            tables.setdefault(table, {}).update({name: FileDefault(value, path) for name, value in options.items()})
    return FileDefaults(tables)


def _read(path: Path, *, is_project: bool) -> dict[str, dict[str, Any]]:
    try:
        document = parse_toml(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return {table: _checked(path, table, options, is_project=is_project) for table, options in document.items()}


def _checked(path: Path, table: str, options: object, *, is_project: bool) -> dict[str, Any]:
    """Return a table's options as the command line would have them.

    Raises:
        ConfigError: there is no such table or option, or it does not belong into this file.
    """
    if not isinstance(options, dict) or table not in ("run", "job", *LAUNCHER_NAMES):
        names = ", ".join(f"[{name}]" for name in ("run", "job", *LAUNCHER_NAMES))
        raise ConfigError(f"{path}: there is no table [{table}]. The tables are: {names}.")
    if is_project and (table != "run" or "python" in options):
        what = "python" if table == "run" else f"the table [{table}]"
        raise ConfigError(
            f"{path} has {what}, which becomes part of commands: a project's file has only options of runs. Put it "
            f"into {user_directory('config') / 'config.toml'}."
        )
    if typed := [name for name in _TYPED if table == "run" and name in options]:
        raise ConfigError(f"{path}: {flag(typed[0])} says which run a command starts, so it must be typed.")
    try:
        if table == "run":
            values = check_keys(options, "[run]")
            for name, value in values.items():
                all_options()[name].parsed(value)
            return values
        known = {f.name for f in dataclasses.fields(JobOptions)}
        if table == "job" and (unknown := [name for name in options if name not in known]):
            raise ConfigError(f"[job] has no option {unknown[0]!r}. The options are: {', '.join(sorted(known))}.")
        return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _as_word(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def show_config(task: str = "", *, json: Annotated[bool, Parameter(negative="")] = False) -> int:
    """Show the options that files set for each command here, and the file of each.

    Args:
        task: The task, as for paceline train: a project's file is next to it.
        json: Print them as JSON.
    """
    defaults = read_defaults(task)
    rows = [
        {"table": table, "option": name, "value": default.value, "file": str(default.file)}
        for table, options in defaults.tables.items()
        for name, default in options.items()
    ]
    if json:
        print(json_module.dumps(rows))
        return 0
    if not rows:
        print("No file sets an option. The files: paceline help config")
        return 0
    from paceline.core.output import ListTable, wide_console

    shown = ListTable("table", "option", "value", "from")
    for row in rows:
        shown.add(str(row["table"]), flag(str(row["option"])), _as_word(row["value"]), str(row["file"]))
    wide_console().print(shown)
    return 0
