"""Where replicas run with ``paceline serve --on ray``, and how many of them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from paceline.distributed.environment import parse_endpoint
from paceline.errors import ConfigError
from paceline.serving.options import ServingOptions, parse_replicas


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """The options of ``--on ray``.

    Attributes:
        address: of a cluster that is there; None: one of the server's own, on this machine.
        least: replicas of each model.
        most: likewise; where there are more requests than the least can answer.
    """

    address: str | None = None
    least: int = 1
    most: int = 1

    @property
    def scales(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.least < self.most

    @classmethod
    def make(cls, address: str | None, replicas: str, options: ServingOptions) -> RayOptions:
        """The options as the command line gives them; RAY_ADDRESS names a cluster, too.

        Raises:
            ConfigError: one of them is out of range, or Ray Serve cannot keep it.
        """
        least, most = parse_replicas(replicas)
        address = address or os.environ.get("RAY_ADDRESS") or None
        if address is not None and address != "auto":
            if "://" in address:
                raise ConfigError(
                    f"--ray-address {address}: the server is a part of the cluster, so it runs on one of its "
                    "machines, and takes HOST:PORT or auto."
                )
            parse_endpoint(address, "--ray-address")
        if len(set(options.devices)) > 1 or ":" in options.devices[0]:
            raise ConfigError(
                f"--devices {','.join(options.devices)}: with --on ray it is cpu or cuda. Ray gives each "
                "replica a GPU of its own."
            )
        return cls(address=address, least=least, most=most)
