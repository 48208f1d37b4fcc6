"""The options of the strategy, memory, parameter servers and communication."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import typing
from dataclasses import dataclass
from functools import partial
from typing import Literal

from paceline.core import plugins
from paceline.core.errors import ConfigError
from paceline.core.options import Capability, Classification, Requirement, flag, option, parse_mesh
from paceline.core.plugins import StrategyPlugin
from paceline.core.process_config import RecoveryOptions

# --- Less communication between data-parallel ranks: compressed gradients, or Local SGD ---


OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
"""The best settings of DiLoCo's outer optimizer according to Douillard et al."""

_NOT_WITH_LOCAL_SGD: tuple[Capability, ...] = ("ema", "corruption", "spares")
"""Capabilities that do not work while the ranks' weights differ."""

_NESTEROV = Requirement(
    "outer_optimizer",
    "nesterov",
    message="--outer-lr and --outer-momentum need --outer-optimizer nesterov.",
)

_communication_option = partial(
    option, group="Local SGD and compression", resume="adjustable", bits="always", scope="parallel"
)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class CommunicationOptions(RecoveryOptions):
    """Options for networks that are slower than the processors."""

    local_sgd_steps: int = _communication_option(
        0,
        "Local SGD: train independently, and average the weights every N steps. 0: sum the gradients in every step.",
        minimum=0,
    )
    outer_optimizer: Literal["none", "nesterov"] = _communication_option(
        "none",
        "With --local-sgd-steps: how to apply the averaged change of the weights. none: use the average; "
        "nesterov: SGD with Nesterov momentum (DiLoCo).",
        requires=Requirement(
            "local_sgd_steps",
            message="--outer-optimizer {own} steps when weights are averaged. Say how often with "
            "--local-sgd-steps, such as --local-sgd-steps 50.",
        ),
    )
    outer_lr: float = _communication_option(
        OUTER_LR, "Learning rate of --outer-optimizer.", requires=_NESTEROV, minimum=0, maximum=math.inf, exclusive=True
    )
    outer_momentum: float = _communication_option(
        OUTER_MOMENTUM, "Momentum of --outer-optimizer.", requires=_NESTEROV, minimum=0, maximum=1, exclusive=True
    )
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"] = _communication_option(
        "none",
        "How DistributedDataParallel compresses gradients: to fp16, to bf16, or to low-rank matrices (powersgd).",
    )
    powersgd_rank: int = _communication_option(
        1,
        "Rank of PowerSGD's matrices: the higher, the nearer to the gradient.",
        requires=Requirement("comm_hook", "powersgd"),
        minimum=1,
    )

    @property
    def non_elastic_communication(self) -> tuple[str, ...]:
        """The given options among these with which no rank can join or leave a running job."""
        local_sgd = (f"--local-sgd-steps {self.local_sgd_steps}",) if self.local_sgd_steps else ()
        return local_sgd if self.comm_hook == "none" else (*local_sgd, f"--comm-hook {self.comm_hook}")

    def check_communication(self, methods: tuple[str, ...], reduction: str, precision: str) -> None:
        """Reject combinations that do not work.

        Args:
            methods: the active strategies.

        Raises:
            ConfigError: the message names the option to leave out.
        """
        for name, off in (("local_sgd_steps", 0), ("comm_hook", "none")):
            value = getattr(self, name)
            if value != off and methods != ("ddp",):
                raise ConfigError(
                    f"{flag(name)} {value} works with --strategy ddp only, not with {', '.join(methods)}. "
                    f"Leave one of them out, or give {flag(name)} {off}."
                )
        if self.local_sgd_steps:
            self._check_local_sgd(reduction)
        if self.comm_hook != "none":
            self._check_hook(reduction, precision)

    def _check_local_sgd(self, reduction: str) -> None:
        if reduction != "exact":
            raise ConfigError(
                f"--reduction {reduction} does not work with --local-sgd-steps: no gradients are summed over the "
                "processes. Leave one of them out."
            )
        for f in dataclasses.fields(self):
            needs = f.metadata["classification"].needs
            if needs in _NOT_WITH_LOCAL_SGD and getattr(self, f.name) != f.default:
                raise ConfigError(
                    f"{flag(f.name)} does not work with --local-sgd-steps, where the ranks' weights differ between "
                    "synchronisations. Leave one of them out."
                )

    def _check_hook(self, reduction: str, precision: str) -> None:
        if self.local_sgd_steps:
            raise ConfigError(
                f"--comm-hook {self.comm_hook} compresses gradients, and with --local-sgd-steps none are sent. "
                "Leave one of them out."
            )
        if reduction == "allreduce":
            raise ConfigError(
                f"--comm-hook {self.comm_hook} is DistributedDataParallel's; --reduction allreduce is not. Leave "
                "--reduction out."
            )
        if self.comm_hook == "powersgd" and precision == "fp16":
            raise ConfigError(
                "--comm-hook powersgd does not work with --precision fp16: its error feedback would "
                "keep the values of an overflowed step. Use --precision bf16."
            )


# --- Memory against recomputation and communication ---

_fsdp_option = partial(option, group="FSDP", strategies=("fsdp",), resume="kept", bits="never", scope="parallel")
_memory_option = partial(option, group="Memory", resume="kept", bits="never", scope="parallel")


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class MemoryOptions(CommunicationOptions):
    """Options that trade memory for time."""

    fsdp_wrap: str = _fsdp_option(
        "auto",
        "With --strategy fsdp: which modules to gather as one: class names with commas, a minimum number "
        "of parameters (auto: 1M), or whole.",
    )
    fsdp_reshard: Literal["auto", "always", "never"] = _fsdp_option(
        "auto",
        "With --strategy fsdp: when to free gathered parameters. auto: after each block's forward, the "
        "outermost's after backward; always: after every forward; never: once per step, as ZeRO-2.",
    )
    fsdp_offload: bool = _fsdp_option(
        False, "With --strategy fsdp: keep parameters, gradients and optimizer state in CPU memory."
    )
    fsdp_mixed_precision: bool = option(
        False,
        "With --strategy fsdp: gather linear and convolutional layers in --precision's type, with half the "
        "traffic and memory.",
        group="FSDP",
        strategies=("fsdp",),
        resume="kept",
        bits="by_strategy",
        scope="parallel",
        requires=Requirement("precision"),
    )
    zero_stage: Literal[1, 2, 3] = option(
        1,
        "With --strategy deepspeed: the sharded state. 1: optimizer state; 2: and gradients; 3: and parameters.",
        group="DeepSpeed",
        strategies=("deepspeed",),
        resume="kept",
        bits="by_strategy",
        scope="parallel",
    )
    checkpoint_activations: Literal["none", "block", "selective"] = _memory_option(
        "none",
        "What backward recomputes instead of keeping. block: all inside a block; selective: all but the "
        "results of matrix products, convolutions and attention.",
        needs="recompute",
    )
    checkpoint_blocks: str = _memory_option(
        "auto",
        "With --checkpoint-activations: the blocks: class names with commas, or a minimum number of "
        "parameters such as 1M. auto: the modules that the model repeats in a list.",
        needs="recompute",
        requires=Requirement("checkpoint_activations"),
    )

    def check_memory(self, precision: str, *, compiles: bool) -> None:
        """Reject combinations that do not work or have no effect.

        Args:
            compiles: whether ``--compile`` is given.

        Raises:
            ConfigError: the message names the option to change.
        """
        if self.zero_stage == 3 and getattr(self, "ema", None) is not None:
            raise ConfigError(
                "--ema does not work with --zero-stage 3, where no rank holds a full parameter. "
                "Use --zero-stage 2, or --strategy fsdp."
            )
        if self.fsdp_offload and precision == "fp16":
            raise ConfigError(
                "--fsdp-offload leaves gradients on the CPU, where the gradient scaler of --precision fp16 "
                "does not look. Use --precision bf16."
            )
        if self.checkpoint_activations != "none" and compiles:
            raise ConfigError(
                "--checkpoint-activations does not work with --compile, which chooses itself what backward "
                "recomputes. Leave one of them out."
            )


# --- Parameter servers ---

_server_option = partial(
    option, group="Parameter server", strategies=("ps",), resume="kept", bits="by_strategy", scope="parallel"
)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ServerOptions(MemoryOptions):
    """Options of ``--strategy ps``."""

    ps_mode: Literal["sync", "async", "ssp"] = _server_option(
        "sync",
        "With --strategy ps: when to apply gradients. sync: when all workers' have arrived, with the bits "
        "of ddp; async: each when it arrives; ssp: as async, with no worker more than --ps-staleness steps "
        "ahead of the slowest.",
    )
    ps_staleness: int | None = _server_option(
        None,
        "With --ps-mode ssp: maximum number of steps that a worker may be ahead of the slowest.",
        requires=Requirement(
            "ps_mode",
            "ssp",
            message="--ps-staleness is for --ps-mode ssp; --ps-mode {value} has no bound to set.",
        ),
        minimum=0,
    )
    ps_servers: int = _server_option(
        1, "With --strategy ps: number of server processes; each holds a part of the parameters.", minimum=1
    )

    def check_servers(self, methods: tuple[str, ...], precision: str, clip_norm: float | None) -> None:
        """Reject combinations that do not work.

        Args:
            methods: the active strategies.

        Raises:
            ConfigError: the message names the options and an alternative.
        """
        if precision == "fp16" and {"ps", "hogwild"} & set(methods):
            raise ConfigError(
                f"--precision fp16 does not work with --strategy {methods[0]}: workers and servers would "
                "need a common loss scale. Use --precision bf16."
            )
        if "ps" not in methods:
            return
        if self.ps_mode == "ssp" and self.ps_staleness is None:
            raise ConfigError("--ps-mode ssp needs --ps-staleness, such as --ps-staleness 2.")
        if self.ps_servers > 1 and clip_norm is not None:
            raise ConfigError(
                "--clip-norm needs all gradients in one place, but --ps-servers divides them. Use --ps-servers 1."
            )

    def servers_of(self, world_size: int) -> int:
        """Return the number of servers among this number of ranks.

        Raises:
            ConfigError: no rank is left to be a worker.
        """
        if world_size < 2:
            raise ConfigError(
                "--strategy ps needs a server and a worker, but there is one process. "
                "Use --nproc 2 or more, or --strategy single."
            )
        if self.ps_servers >= world_size:
            raise ConfigError(
                f"--ps-servers {self.ps_servers} leaves no worker among {world_size} processes. "
                f"Use --ps-servers {world_size - 1} or fewer, or --nproc {self.ps_servers + 1} or more."
            )
        return self.ps_servers


# --- The strategy, and what works with it ---


Schedule = Literal["sequential", "gpipe", "1f1b", "interleaved", "zero-bubble", "pipedream"]


_ALL = frozenset[Capability](typing.get_args(Capability))


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
    supports: frozenset[Capability] = _ALL


STRATEGIES = {
    "single": Traits(elastic=True),
    "dp": Traits(supports=frozenset({"ema", "lockstep"})),
    "ddp": Traits(reductions=("exact", "allreduce", "ddp"), elastic=True),
    "zero1": Traits(shards_state=True, supports=_ALL - {"spares"}),
    "fsdp": Traits(shards_state=True, supports=frozenset({"ema", "recompute", "lockstep"})),
    "tp": Traits(shards_state=True, supports=frozenset({"recompute", "lockstep"})),
    "pp": Traits(shards_state=True, supports=frozenset({"lockstep"})),
    "deepspeed": Traits(
        reductions=("exact",),
        own_reduction="deepspeed",
        shards_state=True,
        supports=frozenset({"ema", "lockstep"}),
    ),
    "horovod": Traits(reductions=("exact",), own_reduction="horovod", supports=_ALL - {"spares"}),
    "hogwild": Traits(reductions=("exact",), supports=frozenset({"compile", "recompute"})),
    "ps": Traits(reductions=("exact",), supports=frozenset({"compile", "recompute"})),
}
"""The capabilities of each of our own strategies, by name."""


def find_traits(name: str) -> Traits:
    """Return the capabilities of a strategy: of one of ours from the table, of a plug-in from its class.

    Raises:
        ConfigError: the plug-in cannot be imported, or its class does not declare them.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    requirement = "a class whose attribute `traits` is a paceline.core.parallel_config.Traits"
    strategy = plugins.load("paceline.strategies", name, requirement, _has_traits)
    traits: Traits = strategy.traits
    return traits


def _has_traits(found: object) -> bool:
    return isinstance(found, type) and isinstance(getattr(found, "traits", None), Traits)


AXIS_TO_STRATEGY = {"pp": "pp", "dp": "ddp", "fsdp": "fsdp", "tp": "tp"}
"""The strategy of each axis of a mesh, outermost axis first."""

DATA_AXES = ("dp", "fsdp")
"""Ranks along these axes have different data; ranks along the other axes compute the same samples."""

StrategyName = Literal[
    "auto", "single", "dp", "ddp", "zero1", "fsdp", "tp", "pp", "deepspeed", "horovod", "ps", "hogwild"
]

_microbatch_option = partial(option, group="Parallelism", resume="fixed", bits="always", scope="training")


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ParallelOptions(ServerOptions):
    """Options of the split of the work."""

    strategy: StrategyName | StrategyPlugin = option(
        "auto",
        "How to divide the work over the processes. auto: single for one process, else ddp if the model "
        "fits, else what paceline plan recommends.",
        group="Parallelism",
        resume="kept",
        bits="by_strategy",
        scope="parallel",
    )
    dp_devices: int | Literal["auto"] = option(
        "auto",
        "With --strategy dp: GPUs, or threads on a CPU. auto: all GPUs, else one thread per core.",
        group="DataParallel",
        strategies=("dp",),
        resume="kept",
        bits="by_strategy",
        scope="parallel",
        minimum=1,
    )
    mesh: str | None = option(
        None,
        "Several strategies at once, as axes and sizes such as fsdp=2,dp=2, whose product is the number of processes.",
        group="Parallelism",
        resume="kept",
        bits="by_strategy",
        scope="parallel",
    )
    sequence_parallel: bool = option(
        False,
        "With --strategy tp: also split the layers in between (norms, dropouts) along the sequence, by the "
        "task's sequence_parallel_plan.",
        group="Tensor",
        strategies=("tp",),
        resume="kept",
        bits="never",
        scope="parallel",
    )
    pp_schedule: Schedule = option(
        "1f1b",
        "With --strategy pp: the order of forwards and backwards. sequential: one micro-batch at a time, as plain "
        "model parallelism; interleaved: two stages per process; "
        "zero-bubble: weight gradients fill the gaps; pipedream: no waiting between steps, and some micro-batches "
        "use weights that are one update old.",
        group="Pipeline",
        strategies=("pp",),
        resume="kept",
        bits="by_strategy",
        scope="parallel",
    )
    pp_split: str = option(
        "balanced",
        "With --strategy pp: how to cut the model. balanced: by its blocks' measured time and "
        "memory; equal: by their number; or blocks per stage, such as 3,5.",
        group="Pipeline",
        strategies=("pp",),
        resume="kept",
        bits="never",
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
    load_balance: Literal["auto", "equal"] = option(
        "auto",
        "How to split the micro-batches over processes. auto: by measured speed if a process is clearly slower "
        "(reduction exact or allreduce); equal: evenly.",
        group="Parallelism",
        resume="kept",
        bits="never",
        scope="recovery",
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

    def __post_init__(self) -> None:
        super().__post_init__()
        axes = parse_mesh(self.mesh, tuple(AXIS_TO_STRATEGY))
        if axes and self.strategy != "auto" and self.strategy not in (AXIS_TO_STRATEGY[axis] for axis in axes):
            named = ", ".join(AXIS_TO_STRATEGY[axis] for axis in axes)
            raise ConfigError(
                f"--mesh {self.mesh} uses {named}, not --strategy {self.strategy}. Leave one of them out."
            )
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, why in self.inapplicable.items():
            if getattr(self, name) != defaults[name]:
                raise ConfigError(f"{flag(name)} {why}")
        for name in self.strategies:
            self._check_reduction(name)
        other_axes = [axis for axis in axes if AXIS_TO_STRATEGY[axis] not in ("pp", "ddp", "tp")]
        if "pp" in self.strategies and other_axes:
            raise ConfigError(
                f"--mesh {self.mesh}: pp can be combined with dp and tp, not with "
                f"{other_axes[0]}. Use --mesh pp=...,dp=...,tp=...."
            )
        if self.pp_split not in ("balanced", "equal") and not re.fullmatch(r"\d+(,\d+)*", self.pp_split):
            raise ConfigError(
                "--pp-split must be balanced, equal, or a number of blocks for each stage such as 3,5, but "
                f"is {self.pp_split!r}."
            )
        if "pp" in self.strategies and self.pp_schedule == "pipedream":
            self._check_works_with_pipedream()
        if self.reducer not in ("exact", "allreduce"):
            engine = "DistributedDataParallel" if self.reducer == "ddp" else self.reducer.capitalize()
            if self.sdc_check_every:
                raise ConfigError(
                    f"--sdc-check-every needs --reduction exact or allreduce: {engine} adds up a rank's micro-batches "
                    "before they can be compared."
                )
            if self.hot_spares:
                raise ConfigError(
                    f"--hot-spares needs --reduction exact or allreduce: {engine} needs a gradient from "
                    "every process, and a spare process has none."
                )

    def _check_works_with_pipedream(self) -> None:
        """Reject split layers, and options that need all stages' gradients before one stage continues."""
        if "tp" in self.strategies:
            raise ConfigError(
                f"--mesh {self.mesh}: --pp-schedule pipedream keeps full weights of each update, and tp "
                "splits them. Use --pp-schedule 1f1b, or leave tp out."
            )
        for name, value in (("clip_norm", None), ("precision", "fp16")):
            given = getattr(self, name, None)
            if given is not None and (value is None or given == value):
                advice = " or --precision bf16" if value else ""
                raise ConfigError(
                    f"{flag(name)} {given} needs all stages' gradients before one is updated, and "
                    f"--pp-schedule pipedream does not wait for them. Use --pp-schedule 1f1b{advice}."
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
        axes = parse_mesh(self.mesh, tuple(AXIS_TO_STRATEGY))
        if axes:
            return tuple(AXIS_TO_STRATEGY[axis] for axis in axes)
        return ("ddp" if self.strategy == "auto" else self.strategy,)

    @property
    def inapplicable(self) -> dict[str, str]:
        """The options that must keep their defaults with the active strategies, each with the end of an error
        message.
        """
        classified: dict[str, Classification] = {
            field.name: field.metadata["classification"] for field in dataclasses.fields(self)
        }
        reasons = {
            option_name: f"does not work with --strategy {name}. Use --strategy ddp."
            for name in self.strategies
            for option_name, option_class in classified.items()
            if option_class.needs is not None and option_class.needs not in find_traits(name).supports
        }
        for option_name, option_class in classified.items():
            applicable = option_class.strategies
            if applicable and not set(applicable) & set(self.strategies):
                named = " or ".join(applicable)
                axes = f", or {named} among the axes of --mesh" if set(applicable) <= set(AXIS_TO_STRATEGY) else ""
                reasons[option_name] = f"needs --strategy {named}{axes}. Leave it out."
        return reasons

    @property
    def shards_state(self) -> bool:
        """Whether a rank holds a part of the state only."""
        return any(find_traits(name).shards_state for name in self.strategies)

    @property
    def reducer(self) -> str:
        """The engine that sums the gradients: ``reduction``, unless the strategy brings its own."""
        own = [traits.own_reduction for name in self.strategies if (traits := find_traits(name)).own_reduction]
        if self.comm_hook != "none":
            return "ddp"
        return own[0] if own else self.reduction

    @property
    def non_elastic_options(self) -> tuple[str, ...]:
        """The given options with which no rank can join or leave a running job."""
        strategies = [f"--strategy {name}" for name in self.strategies if not find_traits(name).elastic]
        return (*strategies, *self.non_elastic_communication)

    def data_ranks(self, world_size: int) -> int:
        """Return how many of ``world_size`` ranks have data of their own; the others compute the same samples.

        Raises:
            ConfigError: as in :meth:`axes`.
        """
        if self.asynchronous:
            return 1
        ranks = math.prod(size for axis, size in self.axes(world_size).items() if axis in DATA_AXES)
        return ranks - self.num_servers(world_size)

    def num_servers(self, world_size: int) -> int:
        """Return how many of ``world_size`` ranks are parameter servers; these are the first ranks.

        Raises:
            ConfigError: no rank is left to be a worker.
        """
        return self.servers_of(world_size) if "ps" in self.strategies else 0

    @property
    def asynchronous(self) -> bool:
        """Whether ranks compute whole steps independently and updates are applied as they arrive."""
        return "hogwild" in self.strategies or ("ps" in self.strategies and self.ps_mode != "sync")

    def axes(self, world_size: int) -> dict[str, int]:
        """Return the mesh axes of ``world_size`` ranks, outermost first, and their sizes.

        Raises:
            ConfigError: ``--mesh`` has another number of ranks; the message suggests the nearest mesh.
        """
        axes = parse_mesh(self.mesh, tuple(AXIS_TO_STRATEGY))
        if not axes:
            (name,) = self.strategies
            return {next((axis for axis, of in AXIS_TO_STRATEGY.items() if of == name), "dp"): world_size}
        size = math.prod(axes.values())
        if size != world_size:
            raise ConfigError(
                f"--mesh {self.mesh} needs {size} processes, but there are {world_size}. "
                f"Use {_nearest(axes, world_size)}, or {size} processes."
            )
        return axes


def _nearest(axes: dict[str, int], world_size: int) -> str:
    """Return the mesh for ``world_size`` ranks whose sizes differ least from those of ``axes``."""
    meshes = [
        sizes for sizes in itertools.product(_divisors(world_size), repeat=len(axes)) if math.prod(sizes) == world_size
    ]
    best = min(meshes, key=lambda sizes: sum(abs(math.log(a / b)) for a, b in zip(sizes, axes.values(), strict=True)))
    return "--mesh " + ",".join(f"{axis}={size}" for axis, size in zip(axes, best, strict=True))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
