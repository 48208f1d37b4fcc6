"""What the link between the ranks is able to do, as far as it is known; imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError

_NETWORK = Path("/sys/class/net")


@dataclass(frozen=True)
class LinkSpeed:
    """The limit that a bus bandwidth is compared with.

    Attributes:
        gbytes_per_s: 10^9 bytes a second; None: not known.
        title: for people: where the number comes from, or why there is none.
    """

    gbytes_per_s: float | None
    title: str

    def share(self, busbw_gbps: float) -> float | None:
        """What part of the limit was reached."""
        return None if self.gbytes_per_s is None else busbw_gbps / self.gbytes_per_s


def find_link(link_gbps: float | None, *, one_machine: bool, interface: str | None) -> LinkSpeed:
    """What the user says, else what the kernel says of the network interface between machines.

    Args:
        link_gbps: ``--link-gbps``, in 10^9 bits a second.
        one_machine: all ranks are on it, so no interface is between them.
        interface: the network interface; default: that of the default route.

    Raises:
        ConfigError: the number is not above 0.
    """
    if link_gbps is not None:
        if link_gbps <= 0:
            raise ConfigError(f"--link-gbps must be above 0, but is {link_gbps:g}.")
        return LinkSpeed(link_gbps / 8, f"--link-gbps {link_gbps:g}")
    if one_machine:
        return LinkSpeed(None, "all ranks are on one machine; say what its memory or NVLink can do: --link-gbps")
    name = interface or os.environ.get("GLOO_SOCKET_IFNAME") or default_interface()
    speed = interface_speed_gbps(name) if name is not None else None
    if speed is None:
        return LinkSpeed(None, f"the kernel does not say how fast {name or 'the network'} is; give --link-gbps")
    return LinkSpeed(speed / 8, f"{name} at {speed:g} Gbit/s")


def default_interface(routes: Path = Path("/proc/net/route")) -> str | None:
    """The interface of the default route."""
    try:
        rows = [line.split() for line in routes.read_text().splitlines()[1:]]
    except OSError:
        return None
    return next((row[0] for row in rows if len(row) > 7 and row[1] == "00000000" == row[7]), None)


def interface_speed_gbps(name: str, network: Path = _NETWORK) -> float | None:
    """Gbit/s of an interface; None where it does not know, as virtual ones often do not."""
    try:
        megabits = int((network / name / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits / 1000 if megabits > 0 else None
