"""Which strategies are compared, and what each guarantees."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from paceline.core.config import config_from_mapping
from paceline.core.errors import ConfigError
from paceline.core.option_sets import select
from paceline.core.options import flag, parse_mesh
from paceline.core.task_loading import check_spec
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import FailureRecord, read_failure

# --- Every way to train, and what it promises: the one table to which a new strategy is added. No torch ---


Class = Literal["bits", "tolerance", "reference", "convergence"]
"""What a method promises.

- bits: the losses, gradients and weights of one process, bit for bit.
- tolerance: as near to a run in float64 as one process in float32 is, times a factor.
- reference: the weights of a simulation of its own schedule in one process, bit for bit.
- convergence: no bits, as the machine decides who comes first, but a loss that falls about as one process's.
"""


@dataclass(frozen=True, kw_only=True)
class StrategyCase:
    """One way to train.

    Attributes:
        name: what ``--strategies`` takes.
        options: of ``paceline train``; a ``*`` in a mesh is what remains of the processes.
        promises: how its results are judged.
        least: the fewest processes.
        most: the most.
        needs: a package that it imports and that not everybody has.
        simulation: ``module:function`` of a method that promises its own reference; called as
            :class:`paceline.insight.verify.worker.Simulation` says.
        takes_callbacks: where not, its steps are not noted: only its weights and recorded losses are judged.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    guarantee: Class = "bits"
    least: int = 2
    most: int | None = None
    needs: str | None = None
    simulation: str | None = None
    takes_callbacks: bool = True

    def with_options(self, options: Mapping[str, Any]) -> StrategyCase:
        """The method, with what it promises where all runs have these options."""
        sharded = self.options.get("strategy") == "fsdp" or "fsdp" in self.options.get("mesh", "")
        if self.guarantee == "bits" and sharded and options.get("clip_norm") is not None:
            return replace(self, guarantee="tolerance")  # the norm is added up from the ranks' parts
        return self

    def options_on(self, world_size: int) -> dict[str, Any] | None:
        """The options for so many processes; None where it is not for so many."""
        if world_size < self.least or (self.most is not None and world_size > self.most):
            return None
        mesh = self.options.get("mesh")
        if mesh is None:
            return dict(self.options)
        fixed = math.prod(size for size in _axes(mesh.replace("*", "1")).values())
        if world_size % fixed:
            return None
        return {**self.options, "mesh": mesh.replace("*", str(world_size // fixed))}


METHODS = (
    StrategyCase(name="single", options={"strategy": "single"}, least=1, most=1),
    StrategyCase(name="dp", options={"strategy": "dp", "dp_devices": 2}, least=1, most=1),
    StrategyCase(name="ddp", options={"strategy": "ddp"}),
    StrategyCase(name="ddp-allreduce", options={"strategy": "ddp", "reduction": "allreduce"}, guarantee="tolerance"),
    StrategyCase(name="ddp-stock", options={"strategy": "ddp", "reduction": "ddp"}, guarantee="tolerance"),
    StrategyCase(
        name="fp16-hook",
        options={"comm_hook": "fp16"},
        guarantee="reference",
        most=2,
        simulation="paceline.insight.verify.reference:simulated_compression",
    ),
    StrategyCase(
        name="bf16-hook",
        options={"comm_hook": "bf16"},
        guarantee="reference",
        most=2,
        simulation="paceline.insight.verify.reference:simulated_compression",
    ),
    StrategyCase(
        name="local-sgd",
        options={"local_sgd_steps": 2},
        guarantee="reference",
        simulation="paceline.insight.verify.reference:simulated_model",
    ),
    StrategyCase(
        name="diloco",
        options={"local_sgd_steps": 2, "outer_optimizer": "nesterov"},
        guarantee="reference",
        simulation="paceline.insight.verify.reference:simulated_model",
    ),
    StrategyCase(name="powersgd-hook", options={"comm_hook": "powersgd"}, guarantee="convergence"),
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
    StrategyCase(
        name="pipedream",
        options={"strategy": "pp", "pp_schedule": "pipedream", "pp_split": "equal"},
        guarantee="reference",
        simulation="paceline.insight.verify.reference:simulated_pipedream",
    ),
    StrategyCase(name="pp-dp", options={"mesh": "pp=2,dp=*"}, least=4),
    StrategyCase(name="pp-tp", options={"mesh": "pp=2,tp=*"}, guarantee="tolerance", least=4, most=4),
    StrategyCase(name="pp-dp-tp", options={"mesh": "pp=2,dp=*,tp=2"}, guarantee="tolerance", least=8),
    StrategyCase(name="ps", options={"strategy": "ps"}, takes_callbacks=False),
    StrategyCase(
        name="ps-async",
        options={"strategy": "ps", "ps_mode": "async"},
        guarantee="convergence",
        takes_callbacks=False,
    ),
    StrategyCase(
        name="ps-ssp",
        options={"strategy": "ps", "ps_mode": "ssp", "ps_staleness": 2},
        guarantee="convergence",
        takes_callbacks=False,
    ),
    StrategyCase(name="hogwild", options={"strategy": "hogwild"}, guarantee="convergence", takes_callbacks=False),
    *(
        StrategyCase(
            name=f"deepspeed-{stage}",
            options={"strategy": "deepspeed", "zero_stage": stage},
            guarantee="tolerance",
            needs="deepspeed",
        )
        for stage in (1, 2, 3)
    ),
    StrategyCase(name="horovod", options={"strategy": "horovod"}, guarantee="tolerance", needs="horovod"),
)
"""All methods, in the order of the report."""


def select_cases(text: str | None) -> tuple[StrategyCase, ...]:
    """The methods that ``--strategies`` names; all where it names none.

    Raises:
        ConfigError: there is none of that name; says which is nearest.
    """
    if text is None:
        return METHODS
    known = {method.name: method for method in METHODS}
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Choose from {', '.join(known)}."
            raise ConfigError(f"--strategies: there is no strategy {name!r}. {hint}")
    if not names:
        raise ConfigError(f"--strategies names none. Choose from {', '.join(known)}.")
    return tuple(known[name] for name in names)


def parse_worlds(text: str) -> tuple[int, ...]:
    """The numbers of processes that ``--worlds`` names, ascending.

    Raises:
        ConfigError: one is no number, or below 1.
    """
    worlds = set()
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) < 1:
            raise ConfigError(f"--worlds must be numbers of processes such as 1,2,4, but is {text!r}.")
        worlds.add(int(word))
    return tuple(sorted(worlds))


def _axes(mesh: str) -> dict[str, int]:
    names = tuple(part.partition("=")[0].strip() for part in mesh.split(","))
    return parse_mesh(mesh, names)


# --- What is to be verified, and what cannot be. No torch ---


_OURS = {
    "strategy": "--strategies",
    "mesh": "--strategies",
    "reduction": "--strategies",
    "nproc": "--worlds",
    "max_steps": "--steps",
    "epochs": "--steps",
}
"""Options of a run for which this command has its own."""

FIXED: dict[str, Any] = {
    "on": "spawn",
    "resume": "never",
    "recover": "none",
    "eval_every": "never",
    "checkpoint_every": ("never",),
    "num_workers": 0,  # they could not import the class that is put around the task
    "load_balance": "equal",
    "log_every": 1_000_000,
}
"""Options of all runs."""

_SCOPES = ("place", "start", "recovery", "evaluation", "records")
_NOT_HERE = dict.fromkeys((*select(lambda its: its.scope in _SCOPES), *FIXED))


@dataclass(frozen=True, kw_only=True)
class VerificationRequest:
    """What to verify.

    Attributes:
        task: as ``paceline train`` takes it.
        options: of all runs.
        methods: which.
        worlds: numbers of processes.
        steps: of each run.
    """

    task: str
    options: Mapping[str, Any]
    cases: Sequence[StrategyCase]
    worlds: Sequence[int]
    steps: int

    def check(self) -> None:
        """Refuse what cannot be verified.

        Raises:
            UserError: says what to give instead.
        """
        check_spec(self.task)
        if self.steps < 1:
            raise ConfigError(f"--steps must be at least 1, but is {self.steps}.")
        for name, own in _OURS.items():
            if name in self.options:
                raise ConfigError(f"{flag(name)} is what verify varies itself. Use {own}.")
        for name in _NOT_HERE:
            if name in self.options:
                raise ConfigError(
                    f"{flag(name)} does not matter to verify, which trains a few steps on this machine. Leave it out."
                )
        microbatches = self.options.get("microbatches")
        if isinstance(microbatches, int) and microbatches < max(self.worlds):
            raise ConfigError(
                f"--microbatches {microbatches} is too few for --worlds {max(self.worlds)}: each process needs one. "
                f"Use --microbatches {max(self.worlds)} or more."
            )
        config_from_mapping(dict(self.options), "the command line")


# --- What a group of processes is asked to train, one run after another. No torch ---


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run of the task.

    Attributes:
        name: of its directory.
        world_size: processes.
        options: of ``paceline train``.
        double: train in float64, and keep the tensors.
        reference: the name of the training whose tensors this one is compared with.
        forward_step: the step of which every module's forward is noted.
        noted: whether its steps are noted.
        simulation: ``module:function`` that computes the weights instead, in one process.
    """

    name: str
    world_size: int
    options: Mapping[str, Any]
    double: bool = False
    reference: str | None = None
    forward_step: int | None = None
    simulation: str | None = None
    noted: bool = True


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """What one group of processes does.

    Attributes:
        task: as ``paceline train`` takes it.
        set: the task's fields.
        root: where each run has its directory.
        least_microbatches: S, where neither options nor task ask for more.
        trainings: one after another.
        lint: look at the task's arithmetic first.
    """

    task: str
    set: tuple[str, ...]
    root: str
    least_microbatches: int
    trainings: tuple[Training, ...] = field(default=())
    lint: bool = False

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> GroupPlan:
        """What :meth:`write` wrote."""
        document = json.loads(path.read_text(encoding="utf-8"))
        trainings = tuple(Training(**training) for training in document.pop("trainings"))
        return cls(**{**document, "set": tuple(document["set"]), "trainings": trainings})


def directory_of(root: Path, training: Training) -> RunDirectory:
    """A training's run directory."""
    return RunDirectory(root / training.name / "run")


def trace_path(root: Path, training: Training, rank: int) -> Path:
    """A rank's steps."""
    return root / training.name / f"trace-{rank}.jsonl"


def forward_path(root: Path, training: Training, rank: int) -> Path:
    """A rank's forwards of the step that is looked into."""
    return root / training.name / f"forward-{rank}.jsonl"


def tensors_path(root: Path, name: str) -> Path:
    """The tensors of the training of that name."""
    return root / name / "tensors"


def outcome_path(root: Path, training: Training) -> Path:
    """The training's ``result.json``, or what was simulated."""
    return root / training.name / "outcome.json"


def done_path(root: Path, training: Training, rank: int) -> Path:
    """What a rank leaves when it is through with a training."""
    return root / training.name / f"done-{rank}"


def lints_path(root: Path) -> Path:
    """What the look at the task's arithmetic found."""
    return root / "lints.json"


def is_done(root: Path, training: Training) -> bool:
    """Whether all ranks are through with it, for good or ill."""
    return all(done_path(root, training, rank).exists() for rank in range(training.world_size))


def failure(root: Path, training: Training) -> FailureRecord | None:
    """The failure that brought a training down; None where there was none."""
    directory = directory_of(root, training)
    found = [read_failure(directory.error_of(rank)) for rank in range(training.world_size)]
    return min((f for f in found if f is not None), key=lambda f: (f.victim, f.time, f.rank), default=None)
