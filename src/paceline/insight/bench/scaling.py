"""How throughput grows with processes: one run for each size, tabulated; imports no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.insight.bench.report import ReportTable, describe_machine, line_chart

Scaling = Literal["strong", "weak"]


@dataclass(frozen=True, kw_only=True)
class SizeResult:
    """What became of one size.

    Attributes:
        processes: over all nodes.
        run: the run's directory.
        global_batch_size: samples a step; None where nothing came back.
        samples_per_s: after the warm-up; None where nothing came back.
        exit_code: of its job.
    """

    processes: int
    run: str
    global_batch_size: int | None
    samples_per_s: float | None
    exit_code: int


def sized_config(
    config: RunConfig, nproc: int, smallest: int, *, scaling: Scaling, steps: int, warmup: int, run: Path
) -> RunConfig:
    """Return the configuration of one size: the same training, measured in windows of ``warmup`` steps.

    Args:
        config: what was asked for.
        nproc: processes a machine.
        smallest: those of the smallest size, which ``config.global_batch_size`` is for.
        scaling: whether the global batch stays, or grows with the processes.
        steps: measured.
        warmup: before those.
        run: the run's directory.

    Raises:
        ConfigError: the batch of a larger size is not known.
    """
    batch = config.global_batch_size
    if scaling == "weak":
        if batch is None:
            raise ConfigError("--scaling weak needs --global-batch-size, which is the smallest size's.")
        batch = batch * nproc // smallest
    return dataclasses.replace(
        config,
        nproc=nproc,
        run_dir=str(run),
        global_batch_size=batch,
        epochs=None,
        max_steps=warmup + steps,
        log_every=warmup,
        eval_every="never",
        checkpoint_every=("never",),
    )


def read_result(run: Path, processes: int, exit_code: int, *, warmup: int) -> SizeResult:
    """Read the measurements of a run, without its first ``warmup`` steps; none if it has no result."""
    result: Mapping[str, Any] = {}
    speeds: list[float] = []
    if exit_code == 0 and (run / "result.json").exists():
        result = json.loads((run / "result.json").read_bytes())
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        # Each record is of as many samples, so the times add up as the inverses do.
        speeds = [
            record["samples_per_s"]
            for record in records
            if record.get("kind") == "train" and record["step"] > warmup and record["samples_per_s"]
        ]
    return SizeResult(
        processes=processes,
        run=str(run),
        global_batch_size=result.get("global_batch_size"),
        samples_per_s=len(speeds) / sum(1 / speed for speed in speeds) if speeds else None,
        exit_code=exit_code,
    )


@dataclass(frozen=True)
class ScalingReport:
    """The results of all sizes; speed-ups are relative to the first.

    Attributes:
        task: what was trained.
        scaling: whether the global batch was the same ("strong"), or grew ("weak").
        results: the sizes, in their order.
    """

    task: str
    scaling: Scaling
    results: Sequence[SizeResult]

    @property
    def failed(self) -> list[SizeResult]:
        """Sizes that nothing came back of."""
        return [result for result in self.results if result.samples_per_s is None]

    def speedup(self, result: SizeResult) -> float | None:
        """Throughput over the first size's."""
        first = self.results[0].samples_per_s
        if first is None or result.samples_per_s is None:
            return None
        return result.samples_per_s / first

    def efficiency(self, result: SizeResult) -> float | None:
        """Return the speed-up over the ideal linear one."""
        speedup = self.speedup(result)
        return None if speedup is None else speedup * self.results[0].processes / result.processes

    def as_json(self) -> dict[str, Any]:
        """Everything, with this machine and its software."""
        return {
            "machine": describe_machine(),
            "task": self.task,
            "scaling": self.scaling,
            "results": [
                {
                    **dataclasses.asdict(result),
                    "speedup": self.speedup(result),
                    "efficiency": self.efficiency(result),
                }
                for result in self.results
            ],
        }

    def tables(self) -> list[ReportTable]:
        """Return the table of sizes, a row for each."""
        return [
            ReportTable(
                headings=_COLUMNS,
                rows=[self._cells(result) for result in self.results],
                title=self._title(),
                failed=[number for number, result in enumerate(self.results) if result.samples_per_s is None],
            )
        ]

    def notes(self) -> list[str]:
        """Return none: the table says it all."""
        return []

    def chart(self) -> str:
        """Draw throughput over processes as SVG, with the ideal linear one."""
        points = [(float(r.processes), r.samples_per_s) for r in self.results if r.samples_per_s]
        if not points:
            raise ConfigError("--plot: no size has come to its end, so there is nothing to draw.")
        each = points[0][1] / points[0][0]
        return line_chart(
            {"measured": points, "nothing lost": [(n, n * each) for n, _ in points]},
            title=self._title(),
            x_label="processes",
            y_label="samples/s",
        )

    def _title(self) -> str:
        batch = "the same global batch" if self.scaling == "strong" else "the batch grows with the processes"
        return f"{self.task}: {self.scaling} scaling ({batch})"

    def _cells(self, result: SizeResult) -> list[str]:
        if result.samples_per_s is None or result.global_batch_size is None:
            why = f"exit code {result.exit_code}" if result.exit_code else "no result"
            return [str(result.processes), *["-"] * (len(_COLUMNS) - 2), why]
        speedup, efficiency = self.speedup(result), self.efficiency(result)
        return [
            str(result.processes),
            str(result.global_batch_size),
            f"{result.samples_per_s:,.0f}",
            f"{result.global_batch_size / result.samples_per_s * 1e3:,.2f}",
            "-" if speedup is None else f"{speedup:.2f}x",
            "-" if efficiency is None else f"{efficiency:.0%}",
        ]


_COLUMNS = ["processes", "batch", "samples/s", "ms/step", "speed-up", "efficiency"]
