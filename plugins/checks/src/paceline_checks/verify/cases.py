"""The compared strategies and their guarantees, and the plan and files of a verification."""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from paceline.core.built_in import VERIFIED
from paceline.core.config import all_options, config_from_mapping, select
from paceline.core.errors import ConfigError
from paceline.core.options import at_least, flag
from paceline.core.plugins import has_part, import_object
from paceline.core.task_loading import check_spec
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import FailureRecord, read_failure

# --- Strategies and their guarantees: the table to which a new strategy is added. No torch ---


Guarantee = Literal["bits", "rounding", "tolerance", "reference", "convergence"]
"""The guarantee of a case.

- bits: the losses, gradients and weights of one process, bit for bit.
- rounding: one process has the weights of a loop in plain PyTorch, both in float64 and within rounding.
- tolerance: as close to a float64 run as one process in float32, times a factor.
- reference: the weights of a simulation of its own schedule in one process, bit for bit.
- convergence: no bits, since timing decides the order of updates, but about the loss decrease of one process.
"""


@dataclass(frozen=True, kw_only=True)
class StrategyCase:
    """One way to train.

    Attributes:
        name: in ``--strategies``.
        options: of ``paceline train``; a ``*`` in a mesh is the remaining number of processes.
        least, most: numbers of processes.
        needs: an optional package that it imports.
        simulation: ``module:function`` of its own reference, or of the plain loop, if that is its guarantee; called
            as :data:`paceline_checks.verify.worker.Simulation`.
        takes_callbacks: if not, its steps are not recorded, and only its weights and losses are compared.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    guarantee: Guarantee = "bits"
    least: int = 2
    most: int | None = None
    needs: str | None = None
    simulation: str | None = None
    takes_callbacks: bool = True

    def with_options(self, options: Mapping[str, Any]) -> StrategyCase:
        """Return the case with its guarantee under these options of all runs."""
        sharded = self.options.get("strategy") == "fsdp" or "fsdp" in self.options.get("mesh", "")
        if self.guarantee == "bits" and sharded and options.get("clip_norm") is not None:
            return replace(self, guarantee="tolerance")  # the norm is summed over the ranks' parts
        return self

    def options_on(self, world_size: int) -> dict[str, Any] | None:
        """Return the options for this number of processes; None if it is not possible."""
        if world_size < self.least or (self.most is not None and world_size > self.most):
            return None
        mesh = self.options.get("mesh")
        if mesh is None:
            return dict(self.options)
        fixed = math.prod(map(int, re.findall(r"=\s*(\d+)", mesh)))
        if world_size % fixed:
            return None
        return {**self.options, "mesh": mesh.replace("*", str(world_size // fixed))}


_CORE_CASES = (
    StrategyCase(name="single", options={"strategy": "single"}, least=1, most=1),
    StrategyCase(
        name="plain-pytorch",
        options={"strategy": "single"},
        guarantee="rounding",
        least=1,
        most=1,
        simulation="paceline_checks.verify.plain:train_plainly",
    ),
    StrategyCase(name="ddp", options={"strategy": "ddp"}),
    StrategyCase(name="ddp-allreduce", options={"strategy": "ddp", "reduction": "allreduce"}, guarantee="tolerance"),
    StrategyCase(name="ddp-stock", options={"strategy": "ddp", "reduction": "ddp"}, guarantee="tolerance"),
    StrategyCase(name="zero1", options={"strategy": "zero1"}),
    StrategyCase(name="fsdp", options={"strategy": "fsdp"}),
    StrategyCase(name="dp-fsdp", options={"mesh": "dp=*,fsdp=2"}, least=4),
    StrategyCase(name="fsdp-allreduce", options={"strategy": "fsdp", "reduction": "allreduce"}, guarantee="tolerance"),
    StrategyCase(name="tp", options={"strategy": "tp"}, guarantee="tolerance"),
    StrategyCase(name="tp-sequence", options={"strategy": "tp", "sequence_parallel": True}, guarantee="tolerance"),
    StrategyCase(name="dp-tp", options={"mesh": "dp=*,tp=2"}, guarantee="tolerance", least=4),
    StrategyCase(name="fsdp-tp", options={"mesh": "fsdp=*,tp=2"}, guarantee="tolerance", least=4),
    StrategyCase(name="pp-sequential", options={"strategy": "pp", "pp_schedule": "sequential"}),
    StrategyCase(name="pp-gpipe", options={"strategy": "pp", "pp_schedule": "gpipe"}),
    StrategyCase(name="pp-1f1b", options={"strategy": "pp", "pp_schedule": "1f1b"}),
    StrategyCase(name="pp-interleaved", options={"strategy": "pp", "pp_schedule": "interleaved"}),
    StrategyCase(name="pp-zero-bubble", options={"strategy": "pp", "pp_schedule": "zero-bubble"}),
    StrategyCase(name="pp-dp", options={"mesh": "pp=2,dp=*"}, least=4),
    StrategyCase(name="pp-tp", options={"mesh": "pp=2,tp=*"}, guarantee="tolerance", least=4, most=4),
    StrategyCase(name="pp-dp-tp", options={"mesh": "pp=2,dp=*,tp=2"}, guarantee="tolerance", least=8),
)
"""The cases of the core's strategies."""


def all_cases() -> tuple[StrategyCase, ...]:
    """Return the cases of the core and of the plug-ins that are installed, in the order of the report."""
    installed = [reference for reference in VERIFIED if has_part(reference)]
    return (*_CORE_CASES, *itertools.chain.from_iterable(map(import_object, installed)))


def select_cases(text: str | None) -> tuple[StrategyCase, ...]:
    """Return the cases that ``--strategies`` names, by default all."""
    if text is None:
        return all_cases()
    known = {case.name: case for case in all_cases()}
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            matches = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {matches[0]}?" if matches else f"Choose from {', '.join(known)}."
            raise ConfigError(f"--strategies contains an unknown strategy {name!r}. {hint}")
    if not names:
        raise ConfigError(f"--strategies must name at least one strategy. Choose from {', '.join(known)}.")
    return tuple(known[name] for name in names)


def parse_worlds(text: str) -> tuple[int, ...]:
    """Return the numbers of processes that ``--worlds`` names, ascending."""
    worlds = set()
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) < 1:
            raise ConfigError(f"--worlds must be numbers of processes such as 1,2,4, but is {text!r}.")
        worlds.add(int(word))
    return tuple(sorted(worlds))


# --- The request. No torch ---


_REPLACED = {
    "strategy": "--strategies",
    "mesh": "--strategies",
    "reduction": "--strategies",
    "nproc": "--worlds",
    "max_steps": "--steps",
    "epochs": "--steps",
}
"""Options of a run that an option of this command replaces."""

_OF_ALL_RUNS: dict[str, Any] = {
    "on": "spawn",
    "resume": "never",
    "recover": "none",
    "eval_every": "never",
    "checkpoint_every": ("never",),
    "num_workers": 0,  # workers could not import the instrumented subclass of the task
    "load_balance": "equal",
    "log_every": 1_000_000,
}
FIXED = {name: value for name, value in _OF_ALL_RUNS.items() if name in all_options()}
"""Options of all runs; those of plug-ins that are not installed are left out."""

_SCOPES = ("place", "start", "recovery", "evaluation", "records")
_UNSUPPORTED = dict.fromkeys((*select(lambda its: its.scope in _SCOPES), *FIXED))


@dataclass(frozen=True, kw_only=True)
class VerificationRequest:
    """The settings of a verification; ``worlds`` are numbers of processes."""

    task: str
    options: Mapping[str, Any]
    cases: Sequence[StrategyCase]
    worlds: Sequence[int]
    steps: int

    def check(self) -> None:
        """Check that the request can be verified."""
        check_spec(self.task)
        at_least("steps", self.steps, 1)
        for name, replacement in _REPLACED.items():
            if name in self.options:
                raise ConfigError(f"{flag(name)} is set by paceline verify itself. Use {replacement}.")
        for name in _UNSUPPORTED:
            if name in self.options:
                raise ConfigError(
                    f"{flag(name)} has no effect on verify, which trains a few steps on this machine. Leave it out."
                )
        microbatches = self.options.get("microbatches")
        if isinstance(microbatches, int) and microbatches < max(self.worlds):
            raise ConfigError(
                f"--microbatches {microbatches} is too few for --worlds {max(self.worlds)}: each process needs one. "
                f"Use --microbatches {max(self.worlds)} or more."
            )
        config_from_mapping(dict(self.options), "the command line")


# --- The plan of a group of processes: one training after another. No torch ---


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run of the task, and its files.

    Attributes:
        root: the verification's directory, in which each training has one of its name.
        options: of ``paceline train``.
        double: train in float64 and keep the tensors.
        reference: name of the training with whose tensors this one is compared.
        forward_step: the step whose module outputs are recorded.
        simulation: ``module:function`` that computes the weights instead, in one process. With a reference, they are
            compared with those that the reference saved at its end.
        float32_reference: the name of the reference of a simulation, if the one in float64 failed.
        noted: whether its steps are recorded.
    """

    root: str
    name: str
    world_size: int
    options: Mapping[str, Any]
    double: bool = False
    reference: str | None = None
    forward_step: int | None = None
    simulation: str | None = None
    float32_reference: str | None = None
    noted: bool = True

    def file(self, name: str) -> Path:
        return Path(self.root) / self.name / name

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.file("run"))

    @property
    def tensors(self) -> Path:
        """The directory of each step's tensors."""
        return self.file("tensors")

    @property
    def outcome(self) -> Path:
        """The file of its ``result.json``, or of its simulated result."""
        return self.file("outcome.json")

    def trace(self, rank: int) -> Path:
        """The file of a rank's steps."""
        return self.file(f"trace-{rank}.jsonl")

    def forward(self, rank: int) -> Path:
        """The file of a rank's module outputs in the inspected step."""
        return self.file(f"forward-{rank}.jsonl")

    def done(self, rank: int) -> Path:
        """The file that a rank creates when it has finished, successfully or not."""
        return self.file(f"done-{rank}")

    @property
    def is_done(self) -> bool:
        return all(self.done(rank).exists() for rank in range(self.world_size))

    @property
    def failures(self) -> list[FailureRecord | None]:
        """What ended each rank, if anything."""
        return [read_failure(self.run.error_of(rank)) for rank in range(self.world_size)]

    @property
    def failure(self) -> FailureRecord | None:
        """What ended it, if anything."""
        return min(
            filter(None, self.failures), key=lambda failed: (failed.victim, failed.time, failed.rank), default=None
        )


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """The trainings of one group of processes.

    Attributes:
        set: fields of the task.
        least_microbatches: number of micro-batches, unless options or task ask for more.
        lint: the file of findings about the task, if it is checked first.
    """

    task: str
    set: tuple[str, ...]
    least_microbatches: int
    trainings: tuple[Training, ...]
    lint: str | None = None
