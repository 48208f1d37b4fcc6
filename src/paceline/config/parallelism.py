"""How work is split over the processes, and what works with which strategy."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from dataclasses import dataclass
from typing import Literal

from paceline.config.options import at_least, flag, option
from paceline.config.servers import ServerOptions
from paceline.config.values import parse_mesh
from paceline.errors import ConfigError

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "sequential", "pipedream"]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What works with a strategy.

    Attributes:
        reductions: the values of ``--reduction`` that it takes.
        sums_itself: what the strategy does with gradients in place of ``--reduction``, where it does.
        flexible: ranks may come and go while others go on, and their shares of the work may differ.
        shards_state: a rank holds a part of the state only: what is saved has to be gathered.
        refuses: options that do not work with it.
    """

    reductions: tuple[str, ...] = ("exact", "fast")
    sums_itself: str | None = None
    flexible: bool = False
    shards_state: bool = False
    refuses: tuple[str, ...] = ()


# Refused where backward cannot compute again: blocks are copied, cut, or watched by another engine.
_AGAIN = ("checkpoint_activations", "checkpoint_blocks")

STRATEGIES = {
    "single": Traits(flexible=True),
    "dp": Traits(refuses=("compile", "verify_every", "spares", *_AGAIN)),
    "ddp": Traits(reductions=("exact", "fast", "torch"), flexible=True),
    "zero1": Traits(shards_state=True, refuses=("spares",)),
    "fsdp": Traits(shards_state=True, refuses=("verify_every", "compile", "spares")),
    "tp": Traits(shards_state=True, refuses=("verify_every", "ema", "compile", "spares")),
    "pp": Traits(shards_state=True, refuses=("verify_every", "ema", "compile", "spares", *_AGAIN)),
    "mp": Traits(shards_state=True, refuses=("verify_every", "ema", "compile", "spares", *_AGAIN)),
    "deepspeed": Traits(
        reductions=("exact",),
        sums_itself="deepspeed",
        shards_state=True,
        refuses=("verify_every", "compile", "spares", *_AGAIN),
    ),
    "horovod": Traits(reductions=("exact",), sums_itself="horovod"),
    "hogwild": Traits(reductions=("exact",), refuses=("verify_every", "ema", "spares", "profile")),
    "ps": Traits(reductions=("exact",), refuses=("verify_every", "ema", "spares", "profile")),
}
"""What works with each strategy, by its name."""

OF_AXIS = {"pp": "pp", "mp": "mp", "dp": "ddp", "fsdp": "fsdp", "tp": "tp"}
"""The strategy of each axis of a mesh, outermost axis first."""

DATA_AXES = ("dp", "fsdp")
"""Ranks that differ only along these have different data; all others compute the same samples together."""

StrategyName = Literal[
    "auto", "single", "dp", "ddp", "zero1", "fsdp", "tp", "pp", "mp", "deepspeed", "horovod", "ps", "hogwild"
]


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ParallelOptions(ServerOptions):
    """How work is split."""

    strategy: StrategyName = option(
        "auto",
        "How work is split. auto: single for one process, else ddp if the model fits, else what the plan "
        "recommends. dp: one process, a thread for each device. zero1: as ddp, with the optimizer's state "
        "sharded over the processes. fsdp: parameters and gradients are, too. tp: each layer is split over "
        "the processes, which compute the same samples together. pp: the model is cut into stages, one or "
        "more a process, and the shards go through them as micro-batches (pipeline). mp: the same with one "
        "shard at a time. deepspeed: ZeRO by DeepSpeed. horovod: Horovod sums the gradients. ps: the first "
        "processes are parameter servers, the others workers. hogwild: all processes of a machine update one "
        "model in shared memory, without locks.",
        group="Parallelism",
    )
    dp_devices: int | Literal["auto"] = option(
        "auto",
        "With --strategy dp, how many GPUs compute, or threads on a CPU. auto: all GPUs, else one a core.",
        group="Parallelism",
        of=("dp",),
    )
    mesh: str | None = option(
        None,
        "Several strategies at once, as a grid of processes such as fsdp=2,dp=2: axes and their sizes, whose "
        "product is the number of processes.",
        group="Parallelism",
    )
    sequence_parallel: bool = option(
        False,
        "With --strategy tp, also split what lies between the split layers (norms, dropouts), along the "
        "sequence, as the task's sequence_parallel_plan says.",
        group="Parallelism",
        of=("tp",),
    )
    pp_schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "pipedream"] = option(
        "1f1b",
        "With --strategy pp, the order of forwards and backwards. interleaved: two stages a process; "
        "zero-bubble: gradients of weights fill the gaps; pipedream: no stage waits at a step's end, "
        "and some shards meet weights that are one update old.",
        group="Parallelism",
        of=("pp",),
    )
    pp_split: str = option(
        "balanced",
        "With --strategy pp or mp, how the model is cut. balanced: by the measured time and memory of its "
        "blocks; equal: by their number; or a number of blocks for each stage, such as 3,5.",
        group="Parallelism",
        of=("pp", "mp"),
    )
    reduction: Literal["exact", "fast", "torch"] = option(
        "exact",
        "How gradients are summed. exact: the same bits for any number of processes; fast: all-reduce; "
        "torch: DistributedDataParallel.",
        group="Parallelism",
    )
    balance: Literal["auto", "equal"] = option(
        "auto",
        "How processes share the shards. auto: by measured speed, where one is clearly slower (reduction "
        "exact or fast); equal: all the same.",
        group="Parallelism",
    )
    shards: int | Literal["auto"] | None = option(
        None, "Logical shards of a global batch, fixed for the run.", group="Parallelism"
    )
    accumulate: int = option(
        1, "Shards a process when --shards is auto (gradient accumulation).", group="Parallelism"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        axes = parse_mesh(self.mesh, tuple(OF_AXIS))
        if axes and self.strategy != "auto" and self.strategy not in (OF_AXIS[axis] for axis in axes):
            named = ", ".join(OF_AXIS[axis] for axis in axes)
            raise ConfigError(
                f"--mesh {self.mesh} is laid out for {named}, not for --strategy {self.strategy}. "
                "Leave one of them out."
            )
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name, why in self.misplaced.items():
            if getattr(self, name) != defaults[name]:
                raise ConfigError(f"{flag(name)} {why}")
        for name in self.methods:
            self._check_reduction(name)
        staged = next((name for name in self.methods if name in ("pp", "mp")), None)
        beside = [axis for axis in axes if OF_AXIS[axis] not in (staged, "ddp", "tp")]
        if staged is not None and beside:
            raise ConfigError(
                f"--mesh {self.mesh}: stages ({staged}) work with dp and tp beside them, not with "
                f"{beside[0]}. Use --mesh {staged}=...,dp=...,tp=...."
            )
        if self.pp_split not in ("balanced", "equal") and not re.fullmatch(r"\d+(,\d+)*", self.pp_split):
            raise ConfigError(
                "--pp-split must be balanced, equal, or a number of blocks for each stage such as 3,5, but "
                f"is {self.pp_split!r}."
            )
        if isinstance(self.dp_devices, int):
            at_least("dp_devices", self.dp_devices, 1)
        if "pp" in self.methods and self.pp_schedule == "pipedream":
            self._check_works_with_pipedream()
        if self.summed_by not in ("exact", "fast") and self.verify_every:
            who = "DistributedDataParallel" if self.summed_by == "torch" else self.summed_by.capitalize()
            raise ConfigError(
                f"--verify-every needs --reduction exact or fast: {who} adds up a rank's shards before they "
                "can be compared."
            )

    def _check_works_with_pipedream(self) -> None:
        """Refuse what takes all stages' gradients before one stage may go on, and split layers."""
        if "tp" in self.methods:
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
        traits = STRATEGIES[name]
        if self.reduction in traits.reductions:
            return
        if traits.sums_itself is not None:
            raise ConfigError(
                f"--reduction {self.reduction} does not work with --strategy {name}, which sums gradients "
                "itself. Leave one of them out."
            )
        if self.reduction != "torch":
            raise ConfigError(
                f"--reduction {self.reduction} does not work with --strategy {name}. "
                f"Use --reduction {' or '.join(traits.reductions)}."
            )
        raise ConfigError(
            f"--reduction {self.reduction} is DistributedDataParallel; it needs --strategy ddp. With "
            f"--strategy {name} use {' or '.join(traits.reductions)}."
        )

    @property
    def methods(self) -> tuple[str, ...]:
        """The strategies at work: one, or one for each axis of the mesh."""
        axes = parse_mesh(self.mesh, tuple(OF_AXIS))
        if axes:
            return tuple(OF_AXIS[axis] for axis in axes)
        return ("ddp" if self.strategy == "auto" else self.strategy,)

    @property
    def misplaced(self) -> dict[str, str]:
        """The options that must keep their defaults beside the strategies at work, and why, for a message."""
        found = {
            option_name: f"does not work with --strategy {name}. Use --strategy ddp."
            for name in self.methods
            for option_name in STRATEGIES[name].refuses
        }
        for field in dataclasses.fields(self):
            of = field.metadata["of"]
            if of and not set(of) & set(self.methods):
                named = " or ".join(of)
                axes = f", or {named} among the axes of --mesh" if set(of) <= set(OF_AXIS) else ""
                found[field.name] = f"needs --strategy {named}{axes}. Leave it out."
        return found

    @property
    def shards_state(self) -> bool:
        """Whether a rank holds a part of the state only."""
        return any(STRATEGIES[name].shards_state for name in self.methods)

    @property
    def summed_by(self) -> str:
        """What sums the gradients: ``reduction``, unless the strategy does."""
        itself = [traits.sums_itself for name in self.methods if (traits := STRATEGIES[name]).sums_itself]
        if self.comm_hook != "none":
            return "torch"
        return itself[0] if itself else self.reduction

    @property
    def schedule(self) -> Schedule:
        """The order of a pipeline's work."""
        return "sequential" if "mp" in self.methods else self.pp_schedule

    @property
    def rigid(self) -> tuple[str, ...]:
        """The options under which no rank can come or go while others go on, as they are given."""
        strategies = [f"--strategy {name}" for name in self.methods if not STRATEGIES[name].flexible]
        return (*strategies, *self.rigid_communication)

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
        return self.servers_of(world_size) if "ps" in self.methods else 0

    @property
    def asynchronous(self) -> bool:
        """Whether a rank computes whole steps by itself, and updates follow each other as they come."""
        return "hogwild" in self.methods or ("ps" in self.methods and self.ps_mode != "sync")

    def axes(self, world_size: int) -> dict[str, int]:
        """The axes along which so many ranks are laid out, outermost first, and their sizes.

        Raises:
            ConfigError: ``--mesh`` is for another number of ranks; names the nearest that is for this one.
        """
        axes = parse_mesh(self.mesh, tuple(OF_AXIS))
        if not axes:
            (name,) = self.methods
            return {next((axis for axis, of in OF_AXIS.items() if of == name), "dp"): world_size}
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
        sizes
        for sizes in itertools.product(_divisors(world_size), repeat=len(axes))
        if math.prod(sizes) == world_size
    ]
    best = min(
        others, key=lambda sizes: sum(abs(math.log(a / b)) for a, b in zip(sizes, axes.values(), strict=True))
    )
    return "--mesh " + ",".join(f"{axis}={size}" for axis, size in zip(axes, best, strict=True))


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
