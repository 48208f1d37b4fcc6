"""The purity guard's record of a run: whether the model depends on the number of processes, or on a restart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.runs.directory import RunDirectory

_NAMES = {
    "microbatches": "micro-batches computed twice",
    "samples": "samples read twice",
    "forward": "steps in which forward left the parameters alone",
    "replicas": "comparisons of all ranks' replicas",
}


@dataclass(frozen=True)
class PuritySummary:
    """The purity guard's part of a run's record.

    Attributes:
        mode: ``--purity``; None for a run of a version without the guard.
        checks: how often rank 0 made each check; empty while the run has no result.
        found: what any rank found, one sentence or two each.
    """

    mode: str | None
    checks: Mapping[str, int]
    found: tuple[str, ...]

    def __str__(self) -> str:
        """Say it in one sentence."""
        if self.found:
            return f"The purity guard found {len(self.found)}: {' '.join(self.found)}"
        if self.mode in (None, "off"):
            return "The purity guard did not check this run."
        made = ", ".join(f"{self.checks[name]:,} {what}" for name, what in _NAMES.items() if self.checks.get(name))
        return f"The purity guard found nothing{f' ({made})' if made else ''}."

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return {"mode": self.mode, "checks": dict(self.checks), "found": list(self.found)}


def read_purity(directory: RunDirectory) -> PuritySummary:
    """Read what the purity guard recorded, also of a run that has not finished.

    Raises:
        RunDirectoryError: this is not a run.
    """
    recorded = _mapping((directory.read_result() or {}).get("purity"))
    mode = recorded.get("mode", _mapping(directory.read_manifest().get("config")).get("purity"))
    found = [str(event.get("message")) for event in directory.read_events() if event["event"] == "impure"]
    checks = {name: count for name, count in _mapping(recorded.get("checks")).items() if type(count) is int}
    return PuritySummary(mode, checks, tuple(dict.fromkeys(found)))


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return what should be a mapping; an empty one if the file says something else."""
    return value if isinstance(value, dict) else {}
