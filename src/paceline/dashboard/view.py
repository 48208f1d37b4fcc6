"""One run, as the page shows it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import asdict
from typing import Any

from paceline.checkpoint.inventory import entries
from paceline.dashboard.curves import Curves
from paceline.errors import PacelineError
from paceline.monitoring.heartbeat import read_beats
from paceline.monitoring.timeline import timeline
from paceline.run_directory import RunDirectory

_MOST_FOLLOWED = 16
_MOST_ENTRIES = 300
_LOG_BYTES = 64 * 1024
_SHOWN_OPTIONS = (
    *("task", "set", "strategy", "mesh", "reduction", "shards", "global_batch_size", "epochs", "max_steps"),
    *("seed", "precision", "compile", "device", "threads", "eval_every", "best", "early_stop", "recover"),
)


class Views:
    """Follows the runs that were last looked at; safe to use from several threads."""

    def __init__(self) -> None:
        self._followed: OrderedDict[str, Curves] = OrderedDict()
        self._lock = threading.Lock()

    def curves(self, run: str, directory: RunDirectory) -> dict[str, Any]:
        """The curves, up to date."""
        with self._lock:
            return {"curves": self._follow(run, directory).as_json()}

    def detail(self, run: str, directory: RunDirectory, row: dict[str, Any]) -> dict[str, Any]:
        """All else that the page shows of a run; what is damaged is left out, and named in ``problems``."""
        problems: list[str] = []
        detail: dict[str, Any] = {"run": row, "problems": problems}
        with self._lock:
            followed = self._follow(run, directory)
            rows = {row["rank"]: row for row in followed.ranks if isinstance(row.get("rank"), int)}
        detail["ranks"] = [
            {**asdict(beat), "telemetry": rows.get(beat.rank)} for beat in read_beats(directory)
        ] or [{"rank": rank, "telemetry": telemetry} for rank, telemetry in sorted(rows.items())]
        for name, read in (("config", _config), ("history", _history), ("checkpoints", _checkpoints)):
            try:
                detail[name] = read(directory)
            except (PacelineError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                detail[name] = None
                problems.append(f"{name}: {error}")
        detail["logs"] = _logs(directory)
        return detail

    def _follow(self, run: str, directory: RunDirectory) -> Curves:
        followed = self._followed.setdefault(run, Curves(directory.metrics))
        self._followed.move_to_end(run)
        while len(self._followed) > _MOST_FOLLOWED:
            self._followed.popitem(last=False)
        followed.update()
        return followed


def log_tail(directory: RunDirectory, rank: int) -> str | None:
    """The end of what a rank printed; None where it has no log."""
    path = directory.log_of(rank)
    try:
        if path.is_symlink() or not path.is_file():
            return None
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LOG_BYTES))
            content = file.read().decode(errors="replace")
    except OSError:
        return None
    return content if size <= _LOG_BYTES else content.partition("\n")[2]


def _config(directory: RunDirectory) -> dict[str, Any]:
    config = directory.read_manifest().get("config", {})
    return {name: config[name] for name in _SHOWN_OPTIONS if name in config}


def _history(directory: RunDirectory) -> dict[str, Any]:
    read = timeline(directory.read_events())
    return {
        "entries": [asdict(entry) for entry in read.entries[-_MOST_ENTRIES:]],
        "left_out": max(0, len(read.entries) - _MOST_ENTRIES),
        "recoveries": [
            {**asdict(interruption), "seconds": round(interruption.seconds, 3)}
            for interruption in read.interruptions[-_MOST_ENTRIES:]
        ],
        "goodput": read.goodput.share,
        "lost_s": dict(read.goodput.lost_s),
    }


def _checkpoints(directory: RunDirectory) -> list[dict[str, Any]]:
    return [
        {
            **{name: getattr(entry, name) for name in ("name", "step", "version", "epoch", "created")},
            "size_bytes": entry.size_bytes,
            "marks": list(entry.marks),
            "problem": entry.problem,
        }
        for entry in entries(directory.checkpoints, None)
    ]


def _logs(directory: RunDirectory) -> list[int]:
    numbers = (path.stem.removeprefix("rank-") for path in directory.logs.glob("rank-*.log"))
    return sorted(int(number) for number in numbers if number.isdecimal())
