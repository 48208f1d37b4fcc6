"""All options of a run: one frozen object, read from the command line, a file, or a run's record."""

from __future__ import annotations

import functools
import math
import os
import typing
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

from paceline.core.built_in import LAUNCHER_OPTIONS, OPTION_GROUPS
from paceline.core.errors import ConfigError, join_names
from paceline.core.files import parse_toml
from paceline.core.option_groups import (
    AXIS_TO_STRATEGY,
    DATA_AXES,
    DataOptions,
    EvaluationOptions,
    ParallelOptions,
    ProcessOptions,
    RecordOptions,
    RecoveryOptions,
    TrainingOptions,
    find_traits,
)
from paceline.core.options import (
    Changes,
    Option,
    OptionGroup,
    flag,
    options_of,
)
from paceline.core.plugins import import_object

# --- All options of a run ---


@functools.cache
def option_groups() -> tuple[type[OptionGroup], ...]:
    """Return all groups of options: the core's, and those of the table that are installed."""
    missing = _missing_packages()
    return (
        *(ProcessOptions, RecoveryOptions, ParallelOptions),
        *(import_object(reference) for reference in OPTION_GROUPS if reference.partition(".")[0] not in missing),
        *(TrainingOptions, DataOptions, EvaluationOptions, RecordOptions),
    )


@functools.cache
def all_options() -> Mapping[str, Option]:
    """Return all options by their names, in the order of the groups."""
    return {name: its for group in option_groups() for name, its in options_of(group).items()}


def _missing_packages() -> list[str]:
    references = (*OPTION_GROUPS, *LAUNCHER_OPTIONS.values())
    packages = dict.fromkeys(reference.partition(".")[0] for reference in references)
    return [package for package in packages if find_spec(package) is None]


def missing_options() -> str:
    """Return where more options are, as the end of a message about an unknown one; "" where all are installed."""
    missing = _missing_packages()
    return f"Others need {join_names(missing)}, which `pip install .` in a checkout installs." if missing else ""


G = TypeVar("G", bound=OptionGroup)


class RunConfig:
    """All options of a training run; ``None`` means "the task's default, else Paceline's".

    An option's value is an attribute of its group, parsed: ``config.training.seed``. Groups of strategies and plug-ins
    are found by their class: ``config[PipelineOptions].pp_schedule``.

    Args:
        given: the options by name, as a user gives them; the others have their defaults.

    Attributes:
        values: all options as they were given, or their defaults.

    Raises:
        ConfigError: an option is unknown, or a value or combination cannot work.
    """

    def __init__(self, **given: Any) -> None:
        options = all_options()
        given = check_keys(given, "the options")
        self.values: Mapping[str, Any] = {name: its.default for name, its in options.items()} | given
        self._groups = {
            group: group(**{name: options[name].parsed(self.values[name]) for name in group.__dataclass_fields__})
            for group in option_groups()
        }
        self.processes = self[ProcessOptions]
        self.recovery = self[RecoveryOptions]
        self.parallel = self[ParallelOptions]
        self.training = self[TrainingOptions]
        self.data = self[DataOptions]
        self.evaluation = self[EvaluationOptions]
        self.records = self[RecordOptions]
        self._check()

    def __getitem__(self, group: type[G]) -> G:
        return cast(G, self._groups[group])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunConfig) and self.values == other.values

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RunConfig({', '.join(f'{name}={value!r}' for name, value in self.non_defaults().items())})"

    def replace(self, **changes: Any) -> Self:
        """Return these options with some changed."""
        return type(self)(**{**self.values, **changes})

    def non_defaults(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as given, in the order of the fields."""
        return {name: self.values[name] for name, its in all_options().items() if self.values[name] != its.default}

    @cached_property
    def _acting(self) -> tuple[OptionGroup, ...]:
        changed = self.non_defaults().keys()
        groups = self._groups.values()
        return tuple(each for each in groups if each.acts_by_default or changed & each.__dataclass_fields__.keys())

    @property
    def strategies(self) -> tuple[str, ...]:
        """The active strategies: one, or one per axis of the mesh."""
        return self.parallel.strategies

    @property
    def reducer(self) -> str:
        """The engine that sums the gradients: ``reduction``, unless a strategy or a group of options brings its own."""
        own = [find_traits(name).own_reduction for name in self.strategies]
        return next(filter(None, [self.changes.reducer, *own]), self.parallel.reduction)

    @property
    def reducer_name(self) -> str:
        """The engine that sums the gradients, as messages call it."""
        return "DistributedDataParallel" if self.reducer == "ddp" else self.reducer.capitalize()

    @cached_property
    def changes(self) -> Changes:
        """What all groups together change in the training."""
        of_groups = [group.changes(self) for group in self._acting]
        return Changes(
            strategy=next((each.strategy for each in of_groups if each.strategy), None),
            reducer=next((each.reducer for each in of_groups if each.reducer), None),
            preparation=next((each.preparation for each in of_groups if each.preparation), None),
            outer_optimizer=next((each.outer_optimizer for each in of_groups if each.outer_optimizer), None),
            sync_every=max(each.sync_every for each in of_groups),
            hooks=tuple(reference for each in of_groups for reference in each.hooks),
            whole_loss=tuple(text for each in of_groups for text in each.whole_loss),
            own_state=tuple(text for each in of_groups for text in each.own_state),
            companions=tuple(reference for each in of_groups for reference in each.companions),
            results={name: value for each in of_groups for name, value in each.results.items()},
        )

    @property
    def inapplicable(self) -> dict[str, str]:
        """The options that must keep their defaults with the active strategies, each with the end of a message."""
        reasons = {}
        for name, its in all_options().items():
            for strategy in self.strategies:
                if its.needs is not None and its.needs not in find_traits(strategy).supports:
                    reasons[name] = f"does not work with --strategy {strategy}. Use --strategy ddp."
            if its.strategies and not set(its.strategies) & set(self.strategies):
                named = " or ".join(its.strategies)
                axes = f", or {named} among the axes of --mesh" if set(its.strategies) <= set(AXIS_TO_STRATEGY) else ""
                reasons[name] = f"needs --strategy {named}{axes}. Leave it out."
        return reasons

    @property
    def non_elastic_options(self) -> tuple[str, ...]:
        """The given options with which no rank can join or leave a running job."""
        strategies = [f"--strategy {name}" for name in self.strategies if not find_traits(name).elastic]
        return (*strategies, *self.changes.own_state)

    @property
    def asynchronous(self) -> bool:
        """Whether ranks compute whole steps independently and updates are applied as they arrive."""
        return any(find_traits(name).is_asynchronous(self) for name in self.strategies)

    def num_servers(self, world_size: int) -> int:
        """Return how many of ``world_size`` ranks are parameter servers; these are the first ranks.

        Raises:
            ConfigError: no rank is left to be a worker.
        """
        return max(find_traits(name).num_servers(self, world_size) for name in self.strategies)

    def data_ranks(self, world_size: int) -> int:
        """Return how many of ``world_size`` ranks have data of their own; the others compute the same samples.

        Raises:
            ConfigError: as in :meth:`ParallelOptions.axes`.
        """
        if self.asynchronous:
            return 1
        ranks = math.prod(size for axis, size in self.parallel.axes(world_size).items() if axis in DATA_AXES)
        return ranks - self.num_servers(world_size)

    def _check(self) -> None:
        changed = self.non_defaults()
        for name, why in self.inapplicable.items():
            if name in changed:
                raise ConfigError(f"{flag(name)} {why}")
        for name, its in all_options().items():
            if its.replaces is not None and None not in (self.values[name], self.values[its.replaces]):
                raise ConfigError(f"give {flag(name)} or {flag(its.replaces)}, not both.")
        for name, own in changed.items():
            self._check_requirement(name, own)
        for group in self._acting:
            group.check(self)

    def _check_requirement(self, name: str, own: object) -> None:
        requires = all_options()[name].requires
        if requires is None:
            return
        value, other = self.values[requires.option], all_options()[requires.option]
        if requires.is_met(value, other.default):
            return
        if requires.message is not None:
            raise ConfigError(requires.message.format(flag=flag(name), own=own, value=value))
        choices = typing.get_args(other.type) if typing.get_origin(other.type) is Literal else ()
        works = [choice for choice in choices if requires.is_met(choice, other.default)]
        what = " ".join([flag(requires.option), " or ".join(map(str, works))]).rstrip()
        raise ConfigError(f"{flag(name)} needs {what}. Give both, or leave {flag(name)} out.")


class ResolvedConfig(RunConfig):
    """The options of a run that was created: those that depend on the task or the number of processes are decided."""

    @property
    def microbatches(self) -> int:
        """Logical micro-batches of a global batch."""
        return cast(int, self.values["microbatches"])

    @property
    def global_batch_size(self) -> int:
        """Samples per step, over all processes."""
        return cast(int, self.values["global_batch_size"])


# --- Configurations from TOML and from keywords ---


def config_from_mapping(values: Mapping[str, Any], source: str) -> RunConfig:
    """Build a configuration from TOML or keyword values.

    Raises:
        ConfigError: an unknown key (with the nearest ones) or a value that cannot work.
    """
    return RunConfig(**check_keys(values, source))


def check_keys(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Reject unknown options, and convert paths to text, and lists and single strings of list options to tuples."""
    import difflib

    known = all_options()
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=3)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"The options are: {', '.join(known)}."
            raise ConfigError(f"{source}: there is no option {key!r}. {hint} {missing_options()}".rstrip())
    return {
        key: os.fspath(value)
        if isinstance(value, os.PathLike)
        else tuple(value)
        if isinstance(value, list)
        else (value,)
        if isinstance(known[key].default, tuple) and isinstance(value, str)
        else value
        for key, value in values.items()
    }


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the options in a TOML file: its ``[config]`` table, or its top level without one.

    Raises:
        ConfigError: the file is missing, is not TOML, or contains an unknown option.
    """
    try:
        document = parse_toml(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: there is no such file.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config {path}: {error}") from error
    options = document.get("config", document)
    if not isinstance(options, dict):
        raise ConfigError(f"--config {path}: config must be a table of options.")
    return check_keys(options, str(path))


def to_flags(values: Mapping[str, Any], *, leave_out: Collection[str] = ()) -> list[str]:
    """Return the command-line words that set these options.

    Args:
        values: the options, such as those of :meth:`RunConfig.non_defaults`.
        leave_out: the names of options to skip.
    """
    words = []
    for name, value in values.items():
        if name in leave_out:
            continue
        if isinstance(value, bool):
            words.append(flag(name))
            continue
        for item in value if isinstance(value, tuple) else (value,):
            words += [flag(name), str(item)]
    return words


def select(predicate: Callable[[Option], bool]) -> tuple[str, ...]:
    """Return the names of the options that satisfy ``predicate``, in the order of the fields."""
    return tuple(name for name, its in all_options().items() if predicate(its))


# --- What a run computes ---


@functools.cache
def incomparable_options() -> tuple[str, ...]:
    """Return the options that say where a run was, and the task, which a configuration names separately."""
    return select(lambda its: its.scope in ("place", "task"))


def configuration(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that decides what a run computes, by name: the task, its fields and all options.

    A field that has the name of an option is ``task.NAME``.

    Args:
        manifest: the content of ``run.toml``.
    """
    task, config = manifest.get("task", {}), manifest.get("config", {})
    options = {name: value for name, value in config.items() if name not in incomparable_options()}
    fields = {f"task.{name}" if name in config else name: value for name, value in task.get("fields", {}).items()}
    return {"task": task.get("spec", ""), **fields, **options}


# --- The options of a resumed run: the current ones and those with which it was created ---


_LAYOUT = ("strategy", "mesh")
OF_FORKS = ("epochs", "max_steps", "global_batch_size", "microbatches")
"""The options of a run that a fork of it may have with other values."""


def resumed_options(current: Mapping[str, Any], explicit: Collection[str], recorded: RunConfig) -> dict[str, Any]:
    """Return the options of a resumed run; the arguments are those of :func:`merge_resumed_options`.

    Raises:
        ConfigError: an option that decides the model's bits was given another value.
    """
    require_unchanged(current, explicit, recorded)
    return merge_resumed_options(current, explicit, recorded)


def merge_resumed_options(current: Mapping[str, Any], explicit: Collection[str], recorded: RunConfig) -> dict[str, Any]:
    """Return all options of a resumed run, each merged as its ``resume`` says.

    Args:
        current: the current options: all of them, or only those that a command line names.
        explicit: the names of the options that the user set, even to the default.
        recorded: the options with which the run was created.
    """
    options = all_options()
    merged: dict[str, Any] = {}
    for name, its in options.items():
        now = current.get(name)
        if its.resume == "fresh" or (its.resume == "kept" and name in current):
            merged[name] = current.get(name, its.default)
        elif its.resume == "adjustable" and name in explicit and now is not None:
            merged[name] = now
        else:
            merged[name] = recorded.values[name]
    if inherited := set(select(lambda its: its.resume == "kept")) - current.keys():
        merged |= {name: options[name].default for name in _dropped(current, recorded) & inherited}
    for name, its in options.items():
        if its.resume not in ("kept", "adjustable") or its.requires is None or name in explicit:
            continue
        if not its.requires.is_met(merged[its.requires.option], options[its.requires.option].default):
            merged[name] = its.default
    return merged


def require_unchanged(current: Mapping[str, Any], explicit: Collection[str], recorded: RunConfig) -> None:
    """Reject a changed value of an option that is fixed at a run's creation.

    Args:
        current: the current options, including ``run_dir``.
        explicit: the names of the options that the user set, even to the default.
        recorded: the options with which the run was created.

    Raises:
        ConfigError: lists the options with both values.
    """
    conflicts = {
        name: f"  {flag(name)}: {before} when the run was created, {current[name]} now"
        for name in select(lambda its: its.resume == "fixed")
        if name in explicit and current[name] not in (before := recorded.values[name], "auto")
    }
    if conflicts:
        forked = [f"{flag(name)} {current[name]}" for name in OF_FORKS if name in conflicts]
        raise ConfigError(
            f"{current['run_dir']} was created with other options, and a run's bits depend on them:\n"
            + "\n".join(conflicts.values())
            + "\nLeave them out to continue the run, or start a new one with another --run-dir DIR."
            + (f" To continue with them: paceline fork {current['run_dir']} {' '.join(forked)}." if forked else "")
        )


def _dropped(current: Mapping[str, Any], recorded: RunConfig) -> set[str]:
    """Return the options that belong to the recorded strategy and do not apply to the current one."""
    if not current.keys() & set(_LAYOUT) and recorded.parallel.strategy != "single":
        return set()
    now = RunConfig(**{name: current[name] for name in _LAYOUT if name in current})
    return {*_LAYOUT, *now.inapplicable}
