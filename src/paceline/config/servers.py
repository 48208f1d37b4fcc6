"""Parameter servers: how many there are, and when they apply a gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.memory import MemoryOptions
from paceline.config.options import at_least, option
from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ServerOptions(MemoryOptions):
    """What goes with ``--strategy ps``."""

    ps_mode: Literal["sync", "async", "ssp"] = option(
        "sync",
        "With --strategy ps, when gradients are applied. sync: once those of all workers are there, to the "
        "bits of ddp; async: as they arrive, each a whole step's; ssp: the same, but no worker gets more "
        "than --staleness steps ahead of the slowest.",
        group="Parallelism",
        of=("ps",),
    )
    staleness: int | None = option(
        None,
        "With --ps-mode ssp, how many steps a worker may be ahead of the slowest; 0: all do equally many.",
        group="Parallelism",
        of=("ps",),
    )
    servers: int = option(
        1,
        "With --strategy ps, how many processes are servers, each with a part of the parameters.",
        group="Parallelism",
        of=("ps",),
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
        at_least("servers", self.servers, 1)
        if self.staleness is not None:
            at_least("staleness", self.staleness, 0)
        if precision == "fp16" and {"ps", "hogwild"} & set(methods):
            raise ConfigError(
                f"--precision fp16 does not work with --strategy {methods[0]}: who computes and who updates "
                "would need one scale. Use --precision bf16."
            )
        if "ps" not in methods:
            return
        if self.ps_mode == "ssp" and self.staleness is None:
            raise ConfigError("--ps-mode ssp needs --staleness, such as --staleness 2.")
        if self.ps_mode != "ssp" and self.staleness is not None:
            raise ConfigError(
                f"--staleness is for --ps-mode ssp; --ps-mode {self.ps_mode} has no bound to set."
            )
        if self.servers > 1 and clip_norm is not None:
            raise ConfigError(
                "--clip-norm needs all gradients in one place, but --servers divides them. Use --servers 1."
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
        if self.servers >= world_size:
            raise ConfigError(
                f"--servers {self.servers} leaves no worker among {world_size} processes. "
                f"Use --servers {world_size - 1} or fewer, or --nproc {self.servers + 1} or more."
            )
        return self.servers
