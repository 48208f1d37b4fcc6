"""The core's groups of options, and what a strategy can do."""

from __future__ import annotations

import itertools
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from paceline.core.built_in import BUILT_IN, TRAITS
from paceline.core.environment import EtcdEndpoints, parse_coordinator
from paceline.core.errors import ConfigError
from paceline.core.files import check_location, check_path
from paceline.core.options import (
    BestMetric,
    Capability,
    Duration,
    EarlyStop,
    Interval,
    NodeRange,
    OptionGroup,
    Requirement,
    Shuffle,
    flag,
    option,
    parse_best,
    parse_duration_s,
    parse_early_stop,
    parse_hang_timeout,
    parse_interval,
    parse_mesh,
    parse_nodes,
    parse_nproc,
    parse_shuffle,
    parse_walltime_s,
)
from paceline.core.plugins import (
    LauncherPlugin,
    StrategyPlugin,
    all_names,
    import_object,
    load,
    names_type,
    plugin_names,
)

if TYPE_CHECKING:
    from paceline.core.config import RunConfig

# ``paceline train --global-batch-size 96``, ``paceline.fit(task, global_batch_size=96)`` and
# ``global_batch_size = 96`` in a ``run.toml`` are the same field. ``--help`` shows the help
# texts of the fields.

# --- Training, data, evaluation, and what is kept ---


_training_option = partial(option, group="Training", resume="fixed", bits="always", scope="training")
_data_option = partial(option, group="Data", resume="fixed", bits="always", scope="data")
_evaluation_option = partial(option, group="Evaluation", resume="fixed", bits="always", scope="evaluation")
_record_option = partial(option, group="Run directory and checkpoints", resume="kept", bits="never", scope="records")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class TrainingOptions(OptionGroup):
    """Options of the optimization."""

    global_batch_size: int | None = _training_option(
        None, "Samples per step, over all processes.", minimum=1, fingerprint=True, evaluation=True
    )
    epochs: int | None = _training_option(
        None, "Passes over the training data.", replaces="max_steps", minimum=1, evaluation=True
    )
    max_steps: int | None = _training_option(
        None,
        "Stop after this many steps, instead of --epochs.",
        replaces="epochs",
        minimum=1,
        evaluation=True,
    )
    seed: int = _training_option(
        0,
        "Seed of the data order, the initial weights and all other randomness.",
        minimum=0,
        maximum=2**63 - 1,
        evaluation=True,
    )
    precision: Literal["fp32", "bf16", "fp16"] = _training_option(
        "fp32", "Mixed precision by torch.amp: bf16 or fp16.", fingerprint=True, evaluation=True
    )
    clip_norm: float | None = _training_option(
        None, "Clip the gradient's 2-norm to this value.", minimum=0, exclusive=True
    )
    ema: float | None = _training_option(
        None,
        "Keep and evaluate an exponential moving average of the weights, with this decay.",
        needs="ema",
        minimum=0,
        maximum=1,
        exclusive=True,
    )
    compile: bool = _training_option(
        False,
        "Compile the model's blocks, or else the model, with torch.compile.",
        needs="compile",
        fingerprint=True,
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class DataOptions(OptionGroup):
    """Options of the training data."""

    shuffle: Shuffle = _data_option("sample", "sample, window:N (blocks of N neighbours) or none.", parse=parse_shuffle)
    num_workers: int | Literal["auto"] = option(
        "auto",
        "Data-loading processes per rank. auto: 0 for tensors, else up to 4.",
        group="Data",
        resume="kept",
        bits="never",
        scope="process",
        minimum=0,
    )
    val_fraction: float | None = _data_option(
        None,
        "Hold out this fraction of the training data for validation.",
        minimum=0,
        maximum=1,
        exclusive=True,
        evaluation=True,
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class EvaluationOptions(OptionGroup):
    """When to evaluate, and how to select the model."""

    eval_every: Interval = _evaluation_option(
        "1epoch",
        "Evaluate every Nsteps or Nepochs, or never.",
        parse=partial(parse_interval, name="eval_every", allow_time=False),
        evaluation=True,
    )
    early_stop: EarlyStop | None = _evaluation_option(
        None,
        "METRIC:PATIENCE or METRIC:min:PATIENCE. Stop after PATIENCE evaluations without a better METRIC. Default: "
        "higher is better, unless its name ends in loss or --best-metric says min.",
        parse=parse_early_stop,
        requires=Requirement(
            "eval_every",
            other_than="never",
            message="--early-stop needs evaluations, but --eval-every is {value}.",
        ),
    )
    best_metric: BestMetric | None = _evaluation_option(
        None, "METRIC:min or METRIC:max, to select the best checkpoint.", parse=parse_best, evaluation=True
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class RecordOptions(OptionGroup):
    """The run directory, checkpoints and logs."""

    run_dir: str | None = option(
        None,
        "The run's directory. Default: runs/TASK-TIME.",
        group="Run directory and checkpoints",
        resume="fresh",
        bits="never",
        scope="place",
        from_launcher=True,
    )
    resume: Literal["auto", "never", "must"] = option(
        "auto",
        "auto: continue an existing run; never: refuse one; must: require one.",
        group="Run directory and checkpoints",
        resume="fresh",
        bits="never",
        scope="place",
    )
    checkpoint_every: tuple[Interval, ...] = _record_option(
        ("1epoch",),
        "Save every Nsteps, Nepochs or time such as 5min; may be repeated. never: only at the end.",
        parse=partial(parse_interval, name="checkpoint_every"),
    )
    keep_checkpoints: int = _record_option(3, "Checkpoints to keep, besides the best.", minimum=1)
    backup_to: str | None = _record_option(
        None,
        "Also copy each verified checkpoint to this directory, in the background. A run that has lost its own "
        "checkpoints resumes from there. An address such as s3://bucket/run1 holds all that paceline resume needs.",
    )
    log_every: int = _record_option(50, "Steps between two log records.", minimum=1)
    log_format: Literal["text", "json"] = _record_option(
        "text",
        "json: without a terminal, progress, metrics and messages are JSON objects, a line each.",
        resume="fresh",
    )
    log_to: tuple[str, ...] = _record_option(
        (),
        "Also log to mlflow or wandb, besides TensorBoard; may be repeated.",
    )

    def check(self, config: RunConfig) -> None:
        """Reject paths that cannot be, and unknown trackers."""
        if self.run_dir is not None:
            check_path(self.run_dir, flag("run_dir"))
        if self.backup_to is not None:
            check_location(self.backup_to, flag("backup_to"))
        for name in self.log_to:
            if name not in BUILT_IN["paceline.trackers"] and name not in plugin_names("paceline.trackers"):
                raise ConfigError(
                    f"--log-to must be {' or '.join(all_names('paceline.trackers'))}, but is {name!r}. TensorBoard "
                    "files are always written."
                )


# --- The task and its processes ---


EnvStyle = Literal["torch", "tensorflow", "horovod", "mpi", "none"]
"""The set of rank variables that a process reads; see :mod:`paceline.launch.rank`."""

RankLauncher = Literal["agent", "torchrun", "spawn", "srun", "mpi", "horovod", "ray"]
"""The program that starts the ranks on the nodes of an allocation."""


_task_option = partial(option, group="Task", resume="fresh", bits="always", scope="task")
_start_option = partial(option, group="Processes", resume="kept", bits="never", scope="start")
_node_option = partial(option, group="Processes", resume="fresh", bits="never", scope="place")
_network_option = partial(option, group="Processes", resume="kept", bits="never", scope="place")
_device_option = partial(option, group="Processes", resume="kept", bits="rounding", scope="process")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ProcessOptions(OptionGroup):
    """Options of the task and its processes."""

    task: str = _task_option("", "file.py:Name, package.module:Name or a built-in task's name.", from_launcher=True)
    set: tuple[str, ...] = _task_option((), "A hyperparameter as field=value; may be repeated.")

    on: str = option(
        "auto",
        "The launcher. auto: inprocess for one process, spawn for several.",
        given=names_type("paceline.launchers", LauncherPlugin),
        group="Processes",
        resume="kept",
        bits="never",
        scope="start",
        from_launcher=True,
    )
    nproc: tuple[int, ...] | None = _start_option(
        1,
        "Processes on this node; auto: one per GPU, else one per core; in a Slurm allocation, its tasks. 8,4: by node.",
        parse=parse_nproc,
        given=int | str,
        from_launcher=True,
    )
    nodes: NodeRange = _start_option(
        1,
        "Number of nodes; run the same command on each. MIN:MAX: start with MIN; more may join and leave.",
        parse=parse_nodes,
        given=int | str,
        from_launcher=True,
    )
    node_rank: int | None = _node_option(None, "This node's rank, 0 to nodes - 1.", from_launcher=True)
    rdzv_endpoint: str | None = _node_option(
        None, "HOST:PORT of node 0, for jobs with several nodes.", from_launcher=True
    )
    token_file: str | None = _node_option(
        None, "File with the secret that the nodes of a run share. Default: in the run directory."
    )
    rdzv_id: str = _network_option("paceline", "A job id that all nodes of a run share.", from_launcher=True)
    backend: Literal["auto", "gloo", "nccl"] = _device_option("auto", "The process group's backend.")
    interface: str | None = _network_option(None, "Network interface for gloo and NCCL, e.g. eth0.", from_launcher=True)
    init_timeout: Duration = option(
        "5min",
        "How long to wait for all processes to start.",
        parse=partial(parse_duration_s, name="init_timeout"),
        group="Processes",
        resume="kept",
        bits="never",
        scope="process",
    )
    comm_debug: bool = option(
        False,
        "Log NCCL, gloo and torch.distributed in detail.",
        group="Processes",
        resume="fresh",
        bits="never",
        scope="process",
    )
    threads: int | None = option(
        None,
        "CPU threads per process; affects the bits. Default: OMP_NUM_THREADS, else cores over processes.",
        group="Processes",
        resume="adjustable",
        bits="rounding",
        scope="process",
        minimum=1,
        from_launcher=True,
        fingerprint=True,
        evaluation=True,
    )
    device: Literal["auto", "cpu", "cuda"] = _device_option("auto", "Where to train. auto: on GPUs if available.")

    def check(self, config: RunConfig) -> None:
        """Reject what does not fit the number of nodes."""
        most_nodes = self.nodes.most
        if most_nodes > 1 and self.rdzv_endpoint is None and self.on in ("spawn", "torchrun"):
            raise ConfigError("--nodes above 1 needs --rdzv-endpoint HOST:PORT, the address of node 0.")
        if self.node_rank is not None and not 0 <= self.node_rank < most_nodes:
            raise ConfigError(f"--node-rank must be between 0 and {most_nodes - 1}, but is {self.node_rank}.")


# --- Recovery from processes that die, hang or compute wrong results ---


_recovery_option = partial(option, group="Recovery", resume="kept", bits="never", scope="recovery")
_heartbeat_option = partial(option, group="Recovery", resume="kept", bits="never", scope="process")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class RecoveryOptions(OptionGroup):
    """Options of fault tolerance."""

    recover: Literal["auto", "none", "inplace", "restart"] = _recovery_option(
        "auto",
        "When a process dies. inplace: replace it while the others continue; restart: restart all from the "
        "newest checkpoint; none: end the job. auto: inplace where supported (--on spawn, CPU, ddp, "
        "reduction exact or allreduce), else restart with --on spawn, else none.",
    )
    hot_spares: int = _recovery_option(
        0, "Spare processes, over all nodes, that hold the state and replace lost ones.", needs="spares", minimum=0
    )
    max_restarts: int = _recovery_option(
        8, "End the job after this many replaced processes without a step of progress.", minimum=0
    )

    coordinator: EtcdEndpoints | None = _recovery_option(
        None,
        "etcd://HOST:PORT[,HOST:PORT...] (etcds:// for TLS): this etcd cluster decides which node leads and which "
        "nodes take part. Default: the nodes agree among themselves.",
        parse=parse_coordinator,
    )

    walltime: Duration | None = _recovery_option(
        None, "Save and stop before this time has passed (s, min, h), with exit code 75.", parse=parse_walltime_s
    )

    heartbeat: float = _heartbeat_option(
        2.0, "Replace a process after this many seconds without a heartbeat.", minimum=0.2, maximum=3600
    )
    hang_timeout: Duration | None = _heartbeat_option(
        "auto",
        "Step timeout, such as 10min; then report the rank that blocks the step and replace it. "
        "auto: learned, at least 30s. never: no limit.",
        parse=parse_hang_timeout,
    )


# --- The split of the work, and what a strategy can do ---


ALL_CAPABILITIES = frozenset[Capability](typing.get_args(Capability))


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The capabilities of a strategy.

    Attributes:
        reductions: the supported values of ``--reduction``.
        own_reduction: the name of the reduction that replaces ``--reduction``, if any.
        elastic: ranks may join and leave while the others continue, and the work split may be uneven.
        shards_state: a rank holds a part of the state only, so a checkpoint must gather it.
        supports: capabilities that options may need.
    """

    reductions: tuple[str, ...] = ("exact", "allreduce")
    own_reduction: str | None = None
    elastic: bool = False
    shards_state: bool = False
    supports: frozenset[Capability] = ALL_CAPABILITIES

    def check(self, config: RunConfig) -> None:
        """Reject options with which the strategy does not work.

        Raises:
            ConfigError: the message names the option to change.
        """

    def is_asynchronous(self, config: RunConfig) -> bool:
        """Return whether ranks compute whole steps independently and updates are applied as they arrive."""
        return False

    def num_servers(self, config: RunConfig, world_size: int) -> int:
        """Return how many of ``world_size`` ranks are parameter servers; these are the first ranks.

        Raises:
            ConfigError: no rank is left to be a worker.
        """
        return 0


STRATEGIES = {
    "single": Traits(elastic=True),
    "ddp": Traits(reductions=("exact", "allreduce", "ddp"), elastic=True),
    "zero1": Traits(shards_state=True, supports=ALL_CAPABILITIES - {"spares"}),
    "fsdp": Traits(shards_state=True, supports=frozenset({"compile", "ema", "recompute", "lockstep"})),
    "tp": Traits(shards_state=True, supports=frozenset({"recompute", "lockstep"})),
    "pp": Traits(shards_state=True, supports=frozenset({"lockstep"})),
}
"""The capabilities of the core's strategies."""


def find_traits(name: str) -> Traits:
    """Return the capabilities of a strategy: the core's, those that a table names, or of another's plug-in's class.

    Raises:
        ConfigError: the plug-in cannot be imported, or its class does not declare them.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    if name in TRAITS:
        ours: Traits = import_object(TRAITS[name])
        return ours
    requirement = "a class whose attribute `traits` is a paceline.core.option_groups.Traits"
    strategy = load("paceline.strategies", name, requirement, _has_traits)
    traits: Traits = strategy.traits
    return traits


def _has_traits(found: object) -> bool:
    return isinstance(found, type) and isinstance(getattr(found, "traits", None), Traits)


AXIS_TO_STRATEGY = {"pp": "pp", "dp": "ddp", "fsdp": "fsdp", "tp": "tp"}
"""The strategy of each axis of a mesh, outermost axis first."""

DATA_AXES = ("dp", "fsdp")
"""Ranks along these axes have different data; ranks along the other axes compute the same samples."""

_microbatch_option = partial(option, group="Parallelism", resume="fixed", bits="always", scope="training")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ParallelOptions(OptionGroup):
    """Options of the split of the work."""

    acts_by_default = True  # other groups' options can take away what the strategy needs

    strategy: str = option(
        "auto",
        "How to divide the work over the processes. auto: single for one process, else ddp if the model "
        "fits, else what paceline plan recommends.",
        given=names_type("paceline.strategies", StrategyPlugin),
        group="Parallelism",
        resume="kept",
        bits="by_strategy",
        scope="parallel",
    )
    mesh: Mapping[str, int] | None = option(
        None,
        "Several strategies at once, as axes and sizes such as fsdp=2,dp=2, whose product is the number of processes.",
        parse=partial(parse_mesh, axes=tuple(AXIS_TO_STRATEGY)),
        group="Parallelism",
        resume="kept",
        bits="by_strategy",
        scope="parallel",
    )
    reduction: Literal["exact", "allreduce", "ddp"] = option(
        "exact",
        "How to sum gradients. exact: the same bits for any number of processes; allreduce: one all-reduce; "
        "ddp: DistributedDataParallel.",
        group="Parallelism",
        resume="fixed",
        bits="always",
        scope="parallel",
        fingerprint=True,
    )
    microbatches: int | Literal["auto"] | None = _microbatch_option(
        None,
        "Logical micro-batches of a global batch; fixed for the run.",
        minimum=1,
        fingerprint=True,
        evaluation=True,
    )
    grad_accumulation: int = _microbatch_option(
        1, "Micro-batches per process with --microbatches auto (gradient accumulation).", minimum=1
    )

    def check(self, config: RunConfig) -> None:
        """Reject a reduction that the strategy does not have, and options that need the gradient of a micro-batch."""
        if self.mesh and self.strategy not in ("auto", *self.strategies):
            raise ConfigError(
                f"--mesh {mesh_text(self.mesh)} uses {', '.join(self.strategies)}, not --strategy {self.strategy}. "
                "Leave one of them out."
            )
        for name in self.strategies:
            self._check_reduction(name)
            find_traits(name).check(config)
        if config.reducer not in ("exact", "allreduce") and config.recovery.hot_spares:
            raise ConfigError(
                f"--hot-spares needs --reduction exact or allreduce: {config.reducer_name} needs a gradient from "
                "every process, and a spare process has none."
            )

    def _check_reduction(self, name: str) -> None:
        traits = find_traits(name)
        if self.reduction in traits.reductions:
            return
        if traits.own_reduction is not None:
            raise ConfigError(
                f"--reduction {self.reduction} does not work with --strategy {name}, which sums gradients "
                "itself. Leave one of them out."
            )
        if self.reduction != "ddp":
            raise ConfigError(
                f"--reduction {self.reduction} does not work with --strategy {name}. "
                f"Use --reduction {' or '.join(traits.reductions)}."
            )
        raise ConfigError(
            f"--reduction {self.reduction} is DistributedDataParallel; it needs --strategy ddp. With "
            f"--strategy {name} use {' or '.join(traits.reductions)}."
        )

    @property
    def strategies(self) -> tuple[str, ...]:
        """The active strategies: one, or one per axis of the mesh."""
        if self.mesh:
            return tuple(AXIS_TO_STRATEGY[axis] for axis in self.mesh)
        return ("ddp" if self.strategy == "auto" else self.strategy,)

    @property
    def shards_state(self) -> bool:
        """Whether a rank holds a part of the state only."""
        return any(find_traits(name).shards_state for name in self.strategies)

    def axes(self, world_size: int) -> dict[str, int]:
        """Return the mesh axes of ``world_size`` ranks, outermost first, and their sizes.

        Raises:
            ConfigError: ``--mesh`` has another number of ranks; the message suggests the nearest mesh.
        """
        if not self.mesh:
            (name,) = self.strategies
            return {next((axis for axis, of in AXIS_TO_STRATEGY.items() if of == name), "dp"): world_size}
        size = math.prod(self.mesh.values())
        if size != world_size:
            raise ConfigError(
                f"--mesh {mesh_text(self.mesh)} needs {size} processes, but there are {world_size}. "
                f"Use {_nearest(self.mesh, world_size)}, or {size} processes."
            )
        return dict(self.mesh)


def mesh_text(axes: Mapping[str, int]) -> str:
    """Return the value of ``--mesh``."""
    return ",".join(f"{axis}={size}" for axis, size in axes.items())


def _nearest(axes: Mapping[str, int], world_size: int) -> str:
    """Return the mesh for ``world_size`` ranks whose sizes differ least from those of ``axes``."""
    meshes = [
        sizes for sizes in itertools.product(_divisors(world_size), repeat=len(axes)) if math.prod(sizes) == world_size
    ]
    best = min(meshes, key=lambda sizes: sum(abs(math.log(a / b)) for a, b in zip(sizes, axes.values(), strict=True)))
    return f"--mesh {mesh_text(dict(zip(axes, best, strict=True)))}"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
