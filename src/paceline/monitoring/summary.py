"""The table at the end of a run: what came out, where it is, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.monitoring.terminal import duration, number
from paceline.run_directory import RunDirectory


def summary(result: Mapping[str, Any], directory: RunDirectory) -> RenderableType:
    """Render ``result.json``'s content for people."""
    metrics = result.get("metrics")
    return Group(
        *([_metrics_table(metrics)] if metrics else []),
        _facts(result, directory),
        Text("Next", style="bold"),
        _next_steps(directory),
    )


def _metrics_table(metrics: Mapping[str, Mapping[str, float]]) -> Table:
    names = list(dict.fromkeys(name for values in metrics.values() for name in values))
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    table.add_column("split")
    for name in names:
        table.add_column(Text(name), justify="right", style="cyan")
    for split, values in metrics.items():
        table.add_row(Text(split), *(number(values[name]) if name in values else "" for name in names))
    return table


def _facts(result: Mapping[str, Any], directory: RunDirectory) -> Text:
    return _pairs(
        {
            "steps": number(result["steps"]) if "steps" in result else None,
            "samples": number(result["samples"]) if "samples" in result else None,
            "speed": f"{result['samples_per_s']:,.0f} samples/s" if result.get("samples_per_s") else None,
            "time": duration(result["seconds"]) if "seconds" in result else None,
            "staleness": _staleness(result.get("staleness")),
            "restarts": number(result["restarts"]) if result.get("restarts") else None,
            "model sha256": result.get("model_sha256"),
            "run": str(directory.path),
        }
    )


def _staleness(found: Mapping[str, Any] | None) -> str | None:
    if not found:
        return None
    return f"{found['mean']:.2f} updates in the mean, {found['max']} at most"


def _next_steps(directory: RunDirectory) -> Text:
    return _pairs(
        {
            "check": f"paceline audit {shlex.quote(str(directory.path))}",
            "curves": f"tensorboard --logdir {shlex.quote(str(directory.tensorboard))}",
            "all runs": "paceline runs",
        }
    )


def _pairs(rows: Mapping[str, str | None]) -> Text:
    # A hash, a path or a command is there to be copied: the terminal may wrap it, we do not break it.
    text = Text(no_wrap=True, overflow="ignore")
    for name, value in rows.items():
        if value is not None:
            text.append(f"{name:{len('model sha256')}}  ", style="dim").append(f"{value}\n")
    return text
