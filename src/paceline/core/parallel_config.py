"""The options of the split of the work, and what a strategy can do."""

from __future__ import annotations

import itertools
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from paceline.core import plugins
from paceline.core.built_in import TRAITS
from paceline.core.errors import ConfigError
from paceline.core.options import Capability, OptionGroup, option, parse_mesh
from paceline.core.plugins import StrategyPlugin, names_type

if TYPE_CHECKING:
    from paceline.core.config import RunConfig


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
    "fsdp": Traits(shards_state=True, supports=frozenset({"ema", "recompute", "lockstep"})),
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
        ours: Traits = plugins.import_object(TRAITS[name])
        return ours
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

_microbatch_option = partial(option, group="Parallelism", resume="fixed", bits="always", scope="training")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ParallelOptions(OptionGroup):
    """Options of the split of the work."""

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
        reducer = config.reducer
        if reducer in ("exact", "allreduce"):
            return
        engine = "DistributedDataParallel" if reducer == "ddp" else reducer.capitalize()
        if config.recovery.sdc_check_every:
            raise ConfigError(
                f"--sdc-check-every needs --reduction exact or allreduce: {engine} adds up a rank's micro-batches "
                "before they can be compared."
            )
        if config.recovery.hot_spares:
            raise ConfigError(
                f"--hot-spares needs --reduction exact or allreduce: {engine} needs a gradient from "
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
