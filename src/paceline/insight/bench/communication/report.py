"""What ``paceline bench comm`` shows: a table as nccl-tests prints, JSON, Markdown, a chart."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

from paceline.insight.bench.chart import line_chart
from paceline.insight.bench.communication.collectives import Op
from paceline.insight.bench.communication.link import LinkSpeed
from paceline.insight.bench.communication.measure import CollectiveTiming
from paceline.insight.bench.machine import describe_machine

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass
class CommunicationReport:
    """The results of one call.

    Attributes:
        carrier: who carried the data, with its version.
        mode: how the ranks were driven.
        ranks: over all machines.
        machines: how many.
        link: what the bus bandwidths are compared with.
        results: in the order in which they were measured.
    """

    carrier: str
    mode: str
    ranks: int
    machines: int
    link: LinkSpeed
    results: Sequence[CollectiveTiming] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """Wrong elements, over all results."""
        return sum(result.wrong for result in self.results)

    def as_json(self) -> dict[str, Any]:
        """Everything, with the machine and its software."""
        return {
            "machine": {**describe_machine(), "host": socket.gethostname()},
            "carrier": self.carrier,
            "mode": self.mode,
            "ranks": self.ranks,
            "machines": self.machines,
            "link": dataclasses.asdict(self.link),
            "results": [
                {**dataclasses.asdict(result), "share_of_link": self.link.share(result.busbw_gbps)}
                for result in self.results
            ],
        }

    def tables(self) -> list[Table]:
        """One for each operation."""
        top = max((result.busbw_gbps for result in self.results), default=0.0)
        tables = []
        for op, results in self._by_op().items():
            table = Table(title=f"{op}: {self._who()}", title_justify="left")
            for name in self._columns():
                table.add_column(name, justify="right")
            table.add_column("")
            for result in results:
                bar: RenderableType = ProgressBar(
                    max(top, 1e-9), result.busbw_gbps, width=20, complete_style="cyan", finished_style="cyan"
                )
                style = "red" if result.wrong else None
                table.add_row(*self._cells(result), bar, style=style)
            tables.append(table)
        return tables

    def as_markdown(self) -> str:
        """The same tables for a document."""
        parts = []
        for op, results in self._by_op().items():
            head = self._columns()
            rows = [head, ["---:"] * len(head), *(self._cells(result) for result in results)]
            parts.append(f"**{op}**: {self._who()}\n")
            parts += [f"| {' | '.join(row)} |" for row in rows]
            parts.append("")
        return "\n".join(parts)

    def notes(self) -> list[str]:
        """What the numbers mean, and whether the results were right."""
        checked = sum(result.checked for result in self.results)
        verdict = (
            f"{self.wrong} of {checked:,} elements are WRONG." if self.wrong else f"All {checked:,} elements are right."
        )
        return [
            "algbw is size over time, busbw that times the operation's factor as in nccl-tests; GB is 10^9 bytes.",
            f"Link: {self.link.title}.",
            verdict,
        ]

    def chart(self) -> str:
        """Bus bandwidth over size as SVG."""
        series: dict[str, list[tuple[float, float]]] = {
            op: [(float(r.size), r.busbw_gbps) for r in results] for op, results in self._by_op().items()
        }
        return line_chart(
            series,
            title=f"Bus bandwidth: {self._who()}",
            x_label="size",
            y_label="GB/s",
            x_text=lambda size: size_text(round(size)),
        )

    def _by_op(self) -> dict[Op, list[CollectiveTiming]]:
        found: dict[Op, list[CollectiveTiming]] = {}
        for result in self.results:
            found.setdefault(result.op, []).append(result)
        return found

    def _who(self) -> str:
        machines = f", {self.machines} machines" if self.machines > 1 else ""
        return f"{self.carrier}, {self.ranks} ranks{machines}, {self.mode}"

    def _columns(self) -> list[str]:
        link = [] if self.link.gbytes_per_s is None else ["of link"]
        return ["size", "time (us)", "algbw (GB/s)", "busbw (GB/s)", *link, "wrong"]

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


def size_text(size: int) -> str:
    """``8 B``, ``1 KiB``, ``1.5 MiB``."""
    power = 0
    while size >= 1024 ** (power + 1) and power < len(_UNITS) - 1:
        power += 1
    return f"{size / 1024**power:.4g} {_UNITS[power]}"
