"""The options of a run's metrics for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from paceline.core.environment import is_loopback
from paceline.core.errors import ConfigError
from paceline.core.options import Changes, OptionGroup, Requirement, option

if TYPE_CHECKING:
    from paceline.core.config import RunConfig

_option = partial(option, group="Run directory and checkpoints", resume="fresh", bits="never", scope="place")
_NEEDS_PORT = Requirement("metrics_port")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class MetricsOptions(OptionGroup):
    """Where a run's metrics can be read."""

    metrics_port: int | None = _option(
        None, "Serve the run's metrics at this port while it trains; 0: a free one.", minimum=0, maximum=65535
    )
    metrics_host: str = _option(
        "127.0.0.1",
        "Address of --metrics-port. One that other machines can reach needs --metrics-token-file.",
        requires=_NEEDS_PORT,
    )
    metrics_token_file: str | None = _option(
        None,
        "File with the token that readers of the metrics send; created if missing. Only its owner may read it.",
        requires=_NEEDS_PORT,
    )

    def check(self, config: RunConfig) -> None:
        """Require a token where other machines can read."""
        if self.metrics_token_file is None and not is_loopback(self.metrics_host):
            raise ConfigError(
                f"--metrics-host {self.metrics_host} can be reached from other machines, so it needs "
                "--metrics-token-file FILE (the file is created if it is missing)."
            )

    def changes(self, config: RunConfig) -> Changes:
        """Serve the metrics, if a port is given."""
        return Changes(
            companions=() if self.metrics_port is None else ("paceline_pages.metrics_server:RunMetricsServer",)
        )
