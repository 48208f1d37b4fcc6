"""Options of load balancing; options and traits of parameter servers, Hogwild, threads, Local SGD, compression."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from paceline.core.config import all_options
from paceline.core.errors import ConfigError
from paceline.core.option_groups import Traits
from paceline.core.options import Capability, Changes, OptionGroup, Requirement, flag, option

if TYPE_CHECKING:
    from paceline.core.config import RunConfig

# --- Load balancing ---


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class LoadBalanceOptions(OptionGroup):
    """Options of the work split."""

    acts_by_default = True

    load_balance: Literal["auto", "equal"] = option(
        "auto",
        "How to split the micro-batches over processes. auto: by measured speed if a process is clearly slower "
        "(reduction exact or allreduce); equal: evenly.",
        group="Parallelism",
        resume="kept",
        bits="never",
        scope="recovery",
    )

    def changes(self, config: RunConfig) -> Changes:
        """The hook itself decides where ranks may have any number of micro-batches: that depends on all changes."""
        hooks = ("paceline_more_strategies.load_balancing:LoadBalancing",) if self.load_balance == "auto" else ()
        return Changes(hooks=hooks)


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


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class CommunicationOptions(OptionGroup):
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

    def changes(self, config: RunConfig) -> Changes:
        """Local SGD averages weights, and compression is that of DistributedDataParallel."""
        if self.local_sgd_steps:
            return Changes(
                strategy="paceline_more_strategies.local_sgd:LocalSGDStrategy",
                outer_optimizer=None
                if self.outer_optimizer == "none"
                else "paceline_more_strategies.local_sgd:OuterOptimizer",
                sync_every=self.local_sgd_steps,
                own_state=(f"--local-sgd-steps {self.local_sgd_steps}",),
                results={"local_sgd_steps": self.local_sgd_steps},
            )
        if self.comm_hook != "none":
            return Changes(
                strategy="paceline_more_strategies.compression:CompressedDDP",
                reducer="ddp",
                own_state=(f"--comm-hook {self.comm_hook}",),
                results={"reduction": self.comm_hook},
            )
        return Changes()

    def check(self, config: RunConfig) -> None:
        """Reject what does not work with the strategy, the reduction or the precision."""
        strategies = config.parallel.strategies
        for name, off in (("local_sgd_steps", 0), ("comm_hook", "none")):
            value = getattr(self, name)
            if value != off and strategies != ("ddp",):
                raise ConfigError(
                    f"{flag(name)} {value} works with --strategy ddp only, not with {', '.join(strategies)}. "
                    f"Leave one of them out, or give {flag(name)} {off}."
                )
        if self.local_sgd_steps:
            self._check_local_sgd(config)
        if self.comm_hook != "none":
            self._check_hook(config.parallel.reduction, config.training.precision)

    def _check_local_sgd(self, config: RunConfig) -> None:
        if config.parallel.reduction != "exact":
            raise ConfigError(
                f"--reduction {config.parallel.reduction} does not work with --local-sgd-steps: no gradients are "
                "summed over the processes. Leave one of them out."
            )
        for name in config.non_defaults():
            if all_options()[name].needs in _NOT_WITH_LOCAL_SGD:
                raise ConfigError(
                    f"{flag(name)} does not work with --local-sgd-steps, where the ranks' weights differ between "
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


# --- Parameter servers ---

_server_option = partial(
    option, group="Parameter server", strategies=("ps",), resume="kept", bits="by_strategy", scope="parallel"
)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ServerOptions(OptionGroup):
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

    def changes(self, config: RunConfig) -> Changes:
        """Where servers do not wait for all workers, each computes whole steps."""
        is_async = "ps" in config.strategies and self.ps_mode != "sync"
        return Changes(strategy="paceline_more_strategies.parameter_server:AsyncParameterServer" if is_async else None)

    def check(self, config: RunConfig) -> None:
        """Reject a mode without its bound, and what needs all gradients in one place."""
        if "ps" not in config.parallel.strategies:
            return
        if self.ps_mode == "ssp" and self.ps_staleness is None:
            raise ConfigError("--ps-mode ssp needs --ps-staleness, such as --ps-staleness 2.")
        if self.ps_servers > 1 and config.training.clip_norm is not None:
            raise ConfigError(
                "--clip-norm needs all gradients in one place, but --ps-servers divides them. Use --ps-servers 1."
            )

    def servers_of(self, world_size: int) -> int:
        """Return the number of servers among this number of ranks."""
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


class _WithoutScaler(Traits):
    """Of a strategy whose ranks do not step together."""

    def check(self, config: RunConfig) -> None:
        if config.training.precision == "fp16":
            raise ConfigError(
                f"--precision fp16 does not work with --strategy {config.parallel.strategies[0]}: workers and servers "
                "would need a common loss scale. Use --precision bf16."
            )


class _ParameterServer(_WithoutScaler):
    def is_asynchronous(self, config: RunConfig) -> bool:
        """Unless servers wait for all workers."""
        return config[ServerOptions].ps_mode != "sync"

    def num_servers(self, config: RunConfig, world_size: int) -> int:
        return config[ServerOptions].servers_of(world_size)


class _Hogwild(_WithoutScaler):
    def is_asynchronous(self, config: RunConfig) -> bool:
        return True


_OWN_STEPS = frozenset[Capability]({"compile", "recompute"})
PARAMETER_SERVER = _ParameterServer(reductions=("exact",), supports=_OWN_STEPS)
HOGWILD = _Hogwild(reductions=("exact",), supports=_OWN_STEPS)
DATA_PARALLEL = Traits(supports=frozenset({"ema", "lockstep"}))


# --- DataParallel ---


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class DataParallelOptions(OptionGroup):
    """Options of ``--strategy dp``."""

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
