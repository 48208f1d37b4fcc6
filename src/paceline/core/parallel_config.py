"""The options that decide how a step is split over processes: strategy, memory, servers, communication."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import typing
from dataclasses import dataclass
from typing import Literal

from paceline.core import plugins
from paceline.core.errors import ConfigError
from paceline.core.options import Capability, Classification, Requirement, flag, option, parse_mesh
from paceline.core.plugins import StrategyPlugin
from paceline.core.process_config import RecoveryOptions

# --- How much data-parallel ranks tell each other: compressed gradients, or parameters now and then ---


OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
"""What Douillard et al. found best for DiLoCo's outer optimizer."""

_NOT_WHILE_APART: tuple[Capability, ...] = ("ema", "corruption", "spares")
"""What ranks cannot do between two synchronisations."""

_NESTEROV = Requirement(
    "outer_optimizer",
    "nesterov",
    message="--outer-lr and --outer-momentum need --outer-optimizer nesterov.",
)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class CommunicationOptions(RecoveryOptions):
    """What crosses a network that is slower than the processors."""

    local_sgd_steps: int = option(
        0,
        "Local SGD: train independently, and average the weights every N steps. 0: sum the gradients in every step.",
        group="Local SGD and compression",
        resume="adjustable",
        bits="always",
        scope="parallel",
        minimum=0,
    )
    outer_optimizer: Literal["none", "nesterov"] = option(
        "none",
        "With --local-sgd-steps: how to apply the averaged change of the weights. none: use the average; "
        "nesterov: SGD with Nesterov momentum (DiLoCo).",
        group="Local SGD and compression",
        resume="adjustable",
        bits="always",
        scope="parallel",
        requires=Requirement(
            "local_sgd_steps",
            message="--outer-optimizer {own} steps when weights are averaged. Say how often with "
            "--local-sgd-steps, such as --local-sgd-steps 50.",
        ),
    )
    outer_lr: float = option(
        OUTER_LR,
        "Learning rate of --outer-optimizer.",
        group="Local SGD and compression",
        resume="adjustable",
        bits="always",
        scope="parallel",
        requires=_NESTEROV,
        minimum=0,
        maximum=math.inf,
        exclusive=True,
    )
    outer_momentum: float = option(
        OUTER_MOMENTUM,
        "Momentum of --outer-optimizer.",
        group="Local SGD and compression",
        resume="adjustable",
        bits="always",
        scope="parallel",
        requires=_NESTEROV,
        minimum=0,
        maximum=1,
        exclusive=True,
    )
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"] = option(
        "none",
        "How DistributedDataParallel compresses gradients: to fp16, to bf16, or to low-rank matrices (powersgd).",
        group="Local SGD and compression",
        resume="adjustable",
        bits="always",
        scope="parallel",
    )
    powersgd_rank: int = option(
        1,
        "Rank of PowerSGD's matrices: the higher, the nearer to the gradient.",
        group="Local SGD and compression",
        resume="adjustable",
        bits="always",
        scope="parallel",
        requires=Requirement("comm_hook", "powersgd"),
        minimum=1,
    )

    @property
    def non_elastic_communication(self) -> tuple[str, ...]:
        """The options among these under which no rank can come or go while others go on."""
        apart = (f"--local-sgd-steps {self.local_sgd_steps}",) if self.local_sgd_steps else ()
        return apart if self.comm_hook == "none" else (*apart, f"--comm-hook {self.comm_hook}")

    def check_communication(self, methods: tuple[str, ...], reduction: str, precision: str) -> None:
        """Refuse what does not go together.

        Args:
            methods: the strategies at work.
            reduction: as asked for.
            precision: of the training.

        Raises:
            ConfigError: says which option to leave out.
        """
        for name, nothing in (("local_sgd_steps", 0), ("comm_hook", "none")):
            value = getattr(self, name)
            if value != nothing and methods != ("ddp",):
                raise ConfigError(
                    f"{flag(name)} {value} works with --strategy ddp only, not with {', '.join(methods)}. "
                    f"Leave one of them out, or give {flag(name)} {nothing}."
                )
        if self.local_sgd_steps:
            self._check_apart(reduction)
        if self.comm_hook != "none":
            self._check_hook(reduction, precision)

    def _check_apart(self, reduction: str) -> None:
        if reduction != "exact":
            raise ConfigError(
                f"--reduction {reduction} does not work with --local-sgd-steps: no gradients are summed over the "
                "processes. Leave one of them out."
            )
        for f in dataclasses.fields(self):
            needs = f.metadata["classification"].needs
            if needs in _NOT_WHILE_APART and getattr(self, f.name) != f.default:
                raise ConfigError(
                    f"{flag(f.name)} does not work with --local-sgd-steps, between whose synchronisations weights "
                    "differ. Leave one of them out."
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
                "--comm-hook powersgd does not work with --precision fp16: what one overflowed step leaves "
                "in its error feedback would stay in all later ones. Use --precision bf16."
            )


# --- What a process keeps of the model, and what it computes or fetches again instead ---


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class MemoryOptions(CommunicationOptions):
    """Memory against time."""

    fsdp_wrap: str = option(
        "auto",
        "With --strategy fsdp: which modules to gather as one: class names with commas, a minimum number "
        "of parameters (auto: 1M), or whole.",
        group="FSDP",
        strategies=("fsdp",),
        resume="kept",
        bits="never",
        scope="parallel",
    )
    fsdp_reshard: Literal["auto", "always", "never"] = option(
        "auto",
        "With --strategy fsdp: when to free gathered parameters. auto: after each block's forward, the "
        "outermost's after backward; always: after every forward; never: once per step, as ZeRO-2.",
        group="FSDP",
        strategies=("fsdp",),
        resume="kept",
        bits="never",
        scope="parallel",
    )
    fsdp_offload: bool = option(
        False,
        "With --strategy fsdp: keep parameters, gradients and optimizer state in CPU memory.",
        group="FSDP",
        strategies=("fsdp",),
        resume="kept",
        bits="never",
        scope="parallel",
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
        "With --strategy deepspeed: what to shard. 1: optimizer state; 2: and gradients; 3: and parameters.",
        group="DeepSpeed",
        strategies=("deepspeed",),
        resume="kept",
        bits="by_strategy",
        scope="parallel",
    )
    checkpoint_activations: Literal["none", "block", "selective"] = option(
        "none",
        "What backward recomputes instead of keeping. block: all inside a block; selective: all but the "
        "results of matrix products, convolutions and attention.",
        group="Memory",
        resume="kept",
        bits="never",
        scope="parallel",
        needs="recompute",
    )
    checkpoint_blocks: str = option(
        "auto",
        "With --checkpoint-activations: what a block is: class names with commas, or a minimum number of "
        "parameters such as 1M. auto: the modules that the model repeats in a list.",
        group="Memory",
        resume="kept",
        bits="never",
        scope="parallel",
        needs="recompute",
        requires=Requirement("checkpoint_activations"),
    )

    def check_memory(self, precision: str, *, compiles: bool) -> None:
        """Refuse what has no effect or does not work together.

        Args:
            precision: the value of ``--precision``.
            compiles: ``--compile`` is given.

        Raises:
            ConfigError: says what to change.
        """
        if self.zero_stage == 3 and getattr(self, "ema", None) is not None:
            raise ConfigError(
                "--ema does not work with --zero-stage 3, where no rank holds a parameter whole. "
                "Use --zero-stage 2, or --strategy fsdp."
            )
        if self.fsdp_offload and precision == "fp16":
            raise ConfigError(
                "--fsdp-offload leaves gradients on the CPU, where the scaler of --precision fp16 does not "
                "find them. Use --precision bf16."
            )
        if self.checkpoint_activations != "none" and compiles:
            raise ConfigError(
                "--checkpoint-activations does not work with --compile, which decides itself what backward "
                "computes again. Leave one of them out."
            )


# --- Parameter servers: how many there are, and when they apply a gradient ---


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ServerOptions(MemoryOptions):
    """What goes with ``--strategy ps``."""

    ps_mode: Literal["sync", "async", "ssp"] = option(
        "sync",
        "With --strategy ps: when to apply gradients. sync: when all workers' have arrived, with the bits "
        "of ddp; async: each when it arrives; ssp: as async, with no worker more than --ps-staleness steps "
        "ahead of the slowest.",
        group="Parameter server",
        strategies=("ps",),
        resume="kept",
        bits="by_strategy",
        scope="parallel",
    )
    ps_staleness: int | None = option(
        None,
        "With --ps-mode ssp: how many steps a worker may be ahead of the slowest.",
        group="Parameter server",
        strategies=("ps",),
        resume="kept",
        bits="by_strategy",
        scope="parallel",
        requires=Requirement(
            "ps_mode",
            "ssp",
            message="--ps-staleness is for --ps-mode ssp; --ps-mode {value} has no bound to set.",
        ),
        minimum=0,
    )
    ps_servers: int = option(
        1,
        "With --strategy ps: how many processes are servers; each holds a part of the parameters.",
        group="Parameter server",
        strategies=("ps",),
        resume="kept",
        bits="by_strategy",
        scope="parallel",
        minimum=1,
    )

    def check_servers(self, methods: tuple[str, ...], precision: str, clip_norm: float | None) -> None:
        """Refuse what does not go together.

        Args:
            methods: the strategies at work.
            precision: of the training.
            clip_norm: what gradients are clipped to.

        Raises:
            ConfigError: names the options, and what to use.
        """
        if precision == "fp16" and {"ps", "hogwild"} & set(methods):
            raise ConfigError(
                f"--precision fp16 does not work with --strategy {methods[0]}: who computes and who updates "
                "would need one scale. Use --precision bf16."
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
        """How many of so many ranks are servers.

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


# --- How work is split over the processes, and what works with which strategy ---


Schedule = Literal["sequential", "gpipe", "1f1b", "interleaved", "zero-bubble", "pipedream"]


_ALL = frozenset[Capability](typing.get_args(Capability))


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What works with a strategy.

    Attributes:
        reductions: the values of ``--reduction`` that it takes.
        own_reduction: what the strategy does with gradients in place of ``--reduction``, where it does.
        elastic: ranks may come and go while others go on, and their shares of the work may differ.
        shards_state: a rank holds a part of the state only: what is saved has to be gathered.
        supports: what options may need of it.
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
"""What works with each strategy of ours, by its name."""


def find_traits(name: str) -> Traits:
    """What works with a strategy: of ours as the table says, of a plug-in as its class does.

    Raises:
        ConfigError: the plug-in cannot be imported, or its class does not say.
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
"""Ranks that differ only along these have different data; all others compute the same samples together."""

StrategyName = Literal[
    "auto", "single", "dp", "ddp", "zero1", "fsdp", "tp", "pp", "deepspeed", "horovod", "ps", "hogwild"
]


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ParallelOptions(ServerOptions):
    """How work is split."""

    strategy: StrategyName | StrategyPlugin = option(
        "auto",
        "How to divide the work over the processes. auto: single for one process, else ddp if the model "
        "fits, else what paceline plan recommends.",
        group="Parallelism",
        resume="kept",
        bits="by_strategy",
        scope="parallel",
        summary=True,
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
        summary=True,
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
        "How to sum gradients. exact: the same bits for any number of processes; fast: all-reduce; torch: "
        "DistributedDataParallel.",
        group="Parallelism",
        resume="fixed",
        bits="always",
        scope="parallel",
        fingerprint=True,
        summary=True,
    )
    load_balance: Literal["auto", "equal"] = option(
        "auto",
        "How to share the micro-batches out. auto: by measured speed where a process is clearly slower (reduction "
        "exact or allreduce); equal: evenly.",
        group="Parallelism",
        resume="kept",
        bits="never",
        scope="recovery",
    )
    microbatches: int | Literal["auto"] | None = option(
        None,
        "Logical micro-batches of a global batch; fixed for the run.",
        group="Parallelism",
        resume="fixed",
        bits="always",
        scope="training",
        minimum=1,
        fingerprint=True,
        evaluation=True,
        summary=True,
    )
    grad_accumulation: int = option(
        1,
        "Micro-batches per process with --microbatches auto (gradient accumulation).",
        group="Parallelism",
        resume="fixed",
        bits="always",
        scope="training",
        minimum=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        axes = parse_mesh(self.mesh, tuple(AXIS_TO_STRATEGY))
        if axes and self.strategy != "auto" and self.strategy not in (AXIS_TO_STRATEGY[axis] for axis in axes):
            named = ", ".join(AXIS_TO_STRATEGY[axis] for axis in axes)
            raise ConfigError(
                f"--mesh {self.mesh} is laid out for {named}, not for --strategy {self.strategy}. "
                "Leave one of them out."
            )
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, why in self.inapplicable.items():
            if getattr(self, name) != defaults[name]:
                raise ConfigError(f"{flag(name)} {why}")
        for name in self.strategies:
            self._check_reduction(name)
        beside = [axis for axis in axes if AXIS_TO_STRATEGY[axis] not in ("pp", "ddp", "tp")]
        if "pp" in self.strategies and beside:
            raise ConfigError(
                f"--mesh {self.mesh}: stages (pp) work with dp and tp beside them, not with "
                f"{beside[0]}. Use --mesh pp=...,dp=...,tp=...."
            )
        if self.pp_split not in ("balanced", "equal") and not re.fullmatch(r"\d+(,\d+)*", self.pp_split):
            raise ConfigError(
                "--pp-split must be balanced, equal, or a number of blocks for each stage such as 3,5, but "
                f"is {self.pp_split!r}."
            )
        if "pp" in self.strategies and self.pp_schedule == "pipedream":
            self._check_works_with_pipedream()
        if self.reducer not in ("exact", "allreduce"):
            who = "DistributedDataParallel" if self.reducer == "ddp" else self.reducer.capitalize()
            if self.sdc_check_every:
                raise ConfigError(
                    f"--sdc-check-every needs --reduction exact or allreduce: {who} adds up a rank's micro-batches "
                    "before they can be compared."
                )
            if self.hot_spares:
                raise ConfigError(
                    f"--hot-spares needs --reduction exact or allreduce: {who} takes a gradient of every process, and "
                    "a spare process has none."
                )

    def _check_works_with_pipedream(self) -> None:
        """Refuse what takes all stages' gradients before one stage may go on, and split layers."""
        if "tp" in self.strategies:
            raise ConfigError(
                f"--mesh {self.mesh}: --pp-schedule pipedream keeps whole weights of each update, and tp "
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
        """The strategies at work: one, or one for each axis of the mesh."""
        axes = parse_mesh(self.mesh, tuple(AXIS_TO_STRATEGY))
        if axes:
            return tuple(AXIS_TO_STRATEGY[axis] for axis in axes)
        return ("ddp" if self.strategy == "auto" else self.strategy,)

    @property
    def inapplicable(self) -> dict[str, str]:
        """The options that must keep their defaults beside the strategies at work, and why, for a message."""
        classified: dict[str, Classification] = {
            field.name: field.metadata["classification"] for field in dataclasses.fields(self)
        }
        found = {
            option_name: f"does not work with --strategy {name}. Use --strategy ddp."
            for name in self.strategies
            for option_name, its in classified.items()
            if its.needs is not None and its.needs not in find_traits(name).supports
        }
        for option_name, its in classified.items():
            of = its.strategies
            if of and not set(of) & set(self.strategies):
                named = " or ".join(of)
                axes = f", or {named} among the axes of --mesh" if set(of) <= set(AXIS_TO_STRATEGY) else ""
                found[option_name] = f"needs --strategy {named}{axes}. Leave it out."
        return found

    @property
    def shards_state(self) -> bool:
        """Whether a rank holds a part of the state only."""
        return any(find_traits(name).shards_state for name in self.strategies)

    @property
    def reducer(self) -> str:
        """What sums the gradients: ``reduction``, unless the strategy does."""
        itself = [traits.own_reduction for name in self.strategies if (traits := find_traits(name)).own_reduction]
        if self.comm_hook != "none":
            return "ddp"
        return itself[0] if itself else self.reduction

    @property
    def non_elastic_options(self) -> tuple[str, ...]:
        """The options under which no rank can come or go while others go on, as they are given."""
        strategies = [f"--strategy {name}" for name in self.strategies if not find_traits(name).elastic]
        return (*strategies, *self.non_elastic_communication)

    def data_ranks(self, world_size: int) -> int:
        """How many of so many ranks have data of their own: the others compute the same samples with them.

        Raises:
            ConfigError: as :meth:`axes` says.
        """
        if self.asynchronous:
            return 1
        ranks = math.prod(size for axis, size in self.axes(world_size).items() if axis in DATA_AXES)
        return ranks - self.num_servers(world_size)

    def num_servers(self, world_size: int) -> int:
        """How many of so many ranks are parameter servers: the first ones.

        Raises:
            ConfigError: no rank is left to be a worker.
        """
        return self.servers_of(world_size) if "ps" in self.strategies else 0

    @property
    def asynchronous(self) -> bool:
        """Whether a rank computes whole steps by itself, and updates follow each other as they come."""
        return "hogwild" in self.strategies or ("ps" in self.strategies and self.ps_mode != "sync")

    def axes(self, world_size: int) -> dict[str, int]:
        """The axes along which so many ranks are laid out, outermost first, and their sizes.

        Raises:
            ConfigError: ``--mesh`` is for another number of ranks; names the nearest that is for this one.
        """
        axes = parse_mesh(self.mesh, tuple(AXIS_TO_STRATEGY))
        if not axes:
            (name,) = self.strategies
            return {next((axis for axis, of in AXIS_TO_STRATEGY.items() if of == name), "dp"): world_size}
        size = math.prod(axes.values())
        if size != world_size:
            raise ConfigError(
                f"--mesh {self.mesh} is for {size} processes, but there are {world_size}. "
                f"Use {_nearest(axes, world_size)}, or {size} processes."
            )
        return axes


def _nearest(axes: dict[str, int], world_size: int) -> str:
    """The mesh for so many ranks whose sizes differ least from those of ``axes``."""
    others = [
        sizes for sizes in itertools.product(_divisors(world_size), repeat=len(axes)) if math.prod(sizes) == world_size
    ]
    best = min(others, key=lambda sizes: sum(abs(math.log(a / b)) for a, b in zip(sizes, axes.values(), strict=True)))
    return "--mesh " + ",".join(f"{axis}={size}" for axis, size in zip(axes, best, strict=True))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
