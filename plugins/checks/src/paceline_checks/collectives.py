"""``paceline bench comm``: the collectives, what is asked of them, and what is reported; no torch is imported.

Time and bandwidths are what NVIDIA's nccl-tests report, by the formulas of its ``doc/PERFORMANCE.md``: the
*algorithm bandwidth* is size over time; the *bus bandwidth* is that times a factor, so that it can be
compared with what the hardware is able to do, whatever the number of ranks.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.core.errors import ConfigError
from paceline.core.options import at_least
from paceline_checks.bench_report import ReportTable, describe_machine, line_chart, size_text

if TYPE_CHECKING:
    import torch

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "p2p"]
Backend = Literal["gloo", "nccl", "mpi"]
Mode = Literal["process-per-device", "one-process", "threads-per-device"]

ELEMENT_BYTES = 4
"""All data are float32, and whole numbers so small that their sums are exact in any order."""

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}iB": 1024**_power, f"{_letter}B": 1000**_power}
_UNITS["kB"] = 1000


@dataclass(frozen=True)
class Collective:
    """One operation of ``size`` bytes over n ranks.

    Attributes:
        divided: the size is that of n equal parts, of which each rank gives or receives one.
        in_place: it works on one buffer.
    """

    op: Op
    divided: bool
    in_place: bool

    def elements(self, size_bytes: int, ranks: int) -> int:
        """Elements of the whole buffer: as many as fit, at least one for each part."""
        parts = ranks if self.divided else 1
        return max(1, size_bytes // (ELEMENT_BYTES * parts)) * parts

    def bus_factor(self, ranks: int) -> float:
        """Bus bandwidth over algorithm bandwidth, as in nccl-tests.

        all_reduce: each element crosses the bottleneck 2(n - 1)/n times; all_gather, reduce_scatter and
        all_to_all: (n - 1)/n times; broadcast and p2p: once.
        """
        if self.op == "all_reduce":
            return 2 * (ranks - 1) / ranks
        if self.divided:
            return (ranks - 1) / ranks
        return 1.0

    def source_elements(self, elements: int, ranks: int) -> int:
        return elements // ranks if self.op == "all_gather" else elements

    def target_elements(self, elements: int, ranks: int) -> int:
        return elements // ranks if self.op == "reduce_scatter" else elements

    def given(self, base: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a rank's values: the repetition's pattern, of :meth:`source_elements`, shifted by its number."""
        return base + rank

    def expected(self, base: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """Return the values that a rank must receive, of :meth:`target_elements`."""
        all_numbers = ranks * (ranks - 1) / 2
        match self.op:
            case "all_reduce":
                return base * ranks + all_numbers
            case "reduce_scatter":
                return base.chunk(ranks)[rank] * ranks + all_numbers
            case "broadcast":
                return base
            case "p2p":
                return base + (rank - 1) % ranks
            case "all_gather":
                return _with_numbers(base.repeat(ranks), ranks)
            case "all_to_all":
                return _with_numbers(base.chunk(ranks)[rank].repeat(ranks), ranks)


def _with_numbers(parts: torch.Tensor, ranks: int) -> torch.Tensor:
    """Add its giver's number to each of n parts."""
    return (parts.view(ranks, -1) + parts.new_tensor(range(ranks)).unsqueeze(1)).flatten()


COLLECTIVES: dict[Op, Collective] = {
    "all_reduce": Collective("all_reduce", divided=False, in_place=True),
    "all_gather": Collective("all_gather", divided=True, in_place=False),
    "reduce_scatter": Collective("reduce_scatter", divided=True, in_place=False),
    "broadcast": Collective("broadcast", divided=False, in_place=True),
    "all_to_all": Collective("all_to_all", divided=True, in_place=False),
    "p2p": Collective("p2p", divided=False, in_place=False),
}
"""p2p: each rank sends to the next one and receives from the one before, as nccl-tests' sendrecv does."""


def pattern(elements: int, repetition: int, device: torch.device) -> torch.Tensor:
    """Whole numbers from 0 to 12, others in each repetition, so that a result that was left over is seen."""
    import torch

    return torch.arange(elements, device=device).add_(7 * repetition).remainder_(13).to(torch.float32)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse ``8B:256MiB`` into bytes, doubling from the first to the last; ``1MiB`` into that alone."""
    least, colon, most = text.partition(":")
    first, last = parse_size(least), parse_size(most if colon else least)
    if first is None or last is None:
        raise ConfigError(f"--sizes must be such as 8B:256MiB or 1MiB (B, KiB, MiB, GiB, KB, MB, GB), but is {text!r}.")
    if not 0 < first <= last:
        raise ConfigError(f"--sizes must go from a smaller size to a larger one, but is {text!r}.")
    return tuple(first << power for power in range((last // first).bit_length()))


def parse_size(text: str) -> int | None:
    """Return the bytes of a text such as "500MB" or "2GiB"; None if it has another form."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    return None if match is None or match[2] not in _UNITS else int(float(match[1]) * _UNITS[match[2]])


@dataclass(frozen=True, kw_only=True)
class CommunicationPlan:
    """What is measured; see the options of ``paceline bench comm``."""

    backend: Backend
    mode: Mode
    ops: tuple[Op, ...]
    sizes: tuple[int, ...]
    nproc: int
    iterations: int = 20
    warmup: int = 5
    interface: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("nproc", 1), ("iterations", 1), ("warmup", 0)):
            at_least(name, getattr(self, name), least)
        if self.mode != "process-per-device" and self.backend == "mpi":
            raise ConfigError(f"--mode {self.mode} does not work with --backend mpi: an MPI rank is a process.")
        if self.mode == "one-process" and self.backend != "nccl":
            raise ConfigError(
                f"--mode one-process drives several GPUs by NCCL, which --backend {self.backend} "
                "cannot. On CPUs use --mode process-per-device or threads-per-device."
            )


# --- what the link between the ranks is able to do, as far as it is known ---


@dataclass(frozen=True)
class LinkSpeed:
    """The limit that a bus bandwidth is compared with, in 10^9 bytes/s; the title says where it comes from."""

    gbytes_per_s: float | None
    title: str

    def share(self, busbw_gbps: float) -> float | None:
        """Return the reached part of the limit."""
        return None if self.gbytes_per_s is None else busbw_gbps / self.gbytes_per_s


def find_link(link_gbps: float | None, *, one_machine: bool, interface: str | None) -> LinkSpeed:
    """Return the user's limit, else the kernel's speed of the network interface between machines.

    Args:
        one_machine: all ranks are on it, so no interface is between them.
        interface: the network interface; default: that of the default route.
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
    """Return the interface of the default route."""
    try:
        rows = [line.split() for line in routes.read_text().splitlines()[1:]]
    except OSError:
        return None
    return next((row[0] for row in rows if len(row) > 7 and row[1] == "00000000" == row[7]), None)


def interface_speed_gbps(name: str, network: Path = Path("/sys/class/net")) -> float | None:
    """Gbit/s of an interface; None where it does not know, as virtual ones often do not."""
    try:
        megabits = int((network / name / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits / 1000 if megabits > 0 else None


# --- the report ---


@dataclass(frozen=True)
class CollectiveTiming:
    """One operation at one size.

    Attributes:
        size: bytes, as nccl-tests counts them: the whole buffer, over all its parts.
        time_us: mean of a call, over repetitions and ranks.
        algbw_gbps, busbw_gbps: in GB/s (10^9 bytes).
        wrong, checked: elements, over all repetitions and ranks.
    """

    op: Op
    size: int
    time_us: float
    algbw_gbps: float
    busbw_gbps: float
    wrong: int
    checked: int


@dataclass(frozen=True)
class CommunicationReport:
    """The results of one call."""

    carrier: str
    mode: str
    ranks: int
    machines: int
    link: LinkSpeed
    results: Sequence[CollectiveTiming]

    @property
    def wrong(self) -> int:
        """Wrong elements, over all results."""
        return sum(result.wrong for result in self.results)

    def as_json(self) -> dict[str, Any]:
        """Everything, with the machine and its software."""
        return {
            "machine": {**describe_machine(), "host": socket.gethostname()},
            **dataclasses.asdict(self),
            "results": [
                {**dataclasses.asdict(result), "share_of_link": self.link.share(result.busbw_gbps)}
                for result in self.results
            ],
        }

    def tables(self) -> list[ReportTable]:
        top = max((result.busbw_gbps for result in self.results), default=0.0)
        link = [] if self.link.gbytes_per_s is None else ["of link"]
        return [
            ReportTable(
                headings=["size", "time (us)", "algbw (GB/s)", "busbw (GB/s)", *link, "wrong"],
                rows=[self._cells(result) for result in results],
                title=op,
                subtitle=self._who,
                failed=[number for number, result in enumerate(results) if result.wrong],
                bars=[result.busbw_gbps / max(top, 1e-9) for result in results],
            )
            for op, results in self._by_op
        ]

    def notes(self) -> list[str]:
        """Return lines about the numbers' meaning, and about the correctness of the results."""
        checked = sum(result.checked for result in self.results)
        verdict = (
            f"{self.wrong} of {checked:,} elements are WRONG." if self.wrong else f"All {checked:,} elements are right."
        )
        return [
            "algbw is size over time, busbw that times the operation's factor as in nccl-tests; GB is 10^9 bytes.",
            f"Link: {self.link.title}.",
            verdict,
        ]

    def plot(self, path: Path) -> None:
        line_chart(
            {op: [(float(r.size), r.busbw_gbps) for r in results] for op, results in self._by_op},
            path,
            title=f"Bus bandwidth: {self._who}",
            x_label="size",
            y_label="GB/s",
            x_text=lambda size: size_text(round(size)),
        )

    @property
    def _by_op(self) -> list[tuple[Op, list[CollectiveTiming]]]:
        return [(op, list(results)) for op, results in groupby(self.results, lambda result: result.op)]

    @property
    def _who(self) -> str:
        machines = f", {self.machines} machines" if self.machines > 1 else ""
        return f"{self.carrier}, {self.ranks} ranks{machines}, {self.mode}"

    def _cells(self, result: CollectiveTiming) -> list[str]:
        share = self.link.share(result.busbw_gbps)
        return [
            size_text(result.size),
            f"{result.time_us:,.1f}",
            f"{result.algbw_gbps:.3g}",
            f"{result.busbw_gbps:.3g}",
            *([] if share is None else [f"{share:.1%}"]),
            str(result.wrong),
        ]
