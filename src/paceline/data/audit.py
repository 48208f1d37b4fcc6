"""The audit: recompute what every step should have seen, and hold the ledger against it.

Each committed step of the final lineage is put in its place in its epoch, its sample numbers are
recomputed from the order of the data, their CRC-32s are compared with those of the samples that
were really fetched, and every sample is ticked off. That takes N / 8 bytes for an epoch (as much
again where samples repeat) and 0.1 to 0.3 us a sample.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from paceline.data.balanced_order import with_saved_sizes
from paceline.data.epoch_audit import (
    EpochAudit,
    EpochAuditor,
    OrderedEpochAuditor,
    Ranges,
    StreamEpochAuditor,
)
from paceline.data.ledger import LedgerEntry, read_ledger
from paceline.data.order import DataOrder
from paceline.errors import RunDirectoryError
from paceline.run_directory import RunDirectory

_SHOWN = 6  # findings in the verdict; all are in the report


@dataclass(frozen=True)
class AuditReport:
    """What the ledger proves about a run.

    Attributes:
        epochs: the epochs that the final lineage has steps of.
        missing_epochs: epochs before the last that it has none of.
        stray_steps: (epoch, step) of steps committed after a later epoch had begun.
        generations: starts of the run that wrote a ledger.
        recomputed_steps: steps that a restart undid and that were computed again, or will be;
            they count in no epoch.
        recomputed_samples: the samples of those.
        result_steps: the steps that ``result.json`` claims, None where there is none.
        checksums_compared: False for a stream, whose sample numbers cannot be recomputed.
    """

    epochs: tuple[EpochAudit, ...]
    missing_epochs: Ranges
    stray_steps: tuple[tuple[int, int], ...]
    generations: int
    recomputed_steps: int
    recomputed_samples: int
    result_steps: int | None
    checksums_compared: bool

    @property
    def steps(self) -> int:
        """Steps of the final lineage, each counted once."""
        return sum(epoch.steps for epoch in self.epochs)

    @property
    def findings(self) -> tuple[str, ...]:
        """What is wrong, a phrase each; empty where nothing is."""
        phrases = [phrase for epoch in self.epochs for phrase in epoch.findings]
        phrases += [
            f"epoch{f' {a}' if a == b else f's {a} to {b}'}: no steps" for a, b in self.missing_epochs
        ]
        phrases += [f"epoch {e}: step {t} came after a later epoch had begun" for e, t in self.stray_steps]
        if self.result_steps is not None and self.steps < self.result_steps:
            phrases.append(f"result.json claims {self.result_steps:,} steps, the ledger has {self.steps:,}")
        return tuple(phrases)

    @property
    def clean(self) -> bool:
        """Whether each sample of each step so far was seen exactly once."""
        return not self.findings

    @property
    def verdict(self) -> str:
        """The outcome in a sentence."""
        if not self.clean:
            more = len(self.findings) - _SHOWN
            shown = [*self.findings[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
            return f"Not clean: {'; '.join(shown)}."
        if not self.epochs:
            return "Clean, but empty: no step has been committed yet."
        if not self.checksums_compared:
            return (
                f"Clean: the {self.steps:,} steps of this stream follow each other without a gap or an "
                "overlap; its sample numbers cannot be recomputed, so no checksums were compared."
            )
        last = self.epochs[-1]
        whole = len(self.epochs) - (1 if last.not_yet else 0)
        parts = [f"every sample of {whole} epoch{'s' if whole > 1 else ''}"] if whole else []
        if last.not_yet:
            parts.append(f"{last.once:,} of the {last.num_samples:,} samples of epoch {last.epoch}")
        return f"Clean{' so far' if last.not_yet else ''}: {' and '.join(parts)} seen exactly once."

    def to_json(self) -> dict[str, Any]:
        """The report as JSON types."""
        summary = {"clean": self.clean, "verdict": self.verdict, "steps": self.steps}
        return {**summary, **dataclasses.asdict(self)}


def audit(run: RunDirectory) -> AuditReport:
    """Audit a run, finished or not, also while it runs.

    Raises:
        RunDirectoryError: this is no run, it has no ledger, or the ledger is malformed.
    """
    run.read_manifest()
    # Read before the ledger: a run at work adds its steps first and its result last.
    result_steps = _result_steps(run)
    ledger = read_ledger(run.ledger)
    lineage = _LineageAuditor(with_saved_sizes(ledger.order, run.sample_sizes))
    recomputed_steps = recomputed_samples = 0
    for entry, final in ledger.entries():
        if final:
            lineage.add(entry)
        else:
            recomputed_steps += 1
            recomputed_samples += entry.stop - entry.start
    return AuditReport(
        epochs=lineage.finish(),
        missing_epochs=tuple(lineage.missing_epochs),
        stray_steps=tuple(lineage.stray_steps),
        generations=len(ledger.files),
        recomputed_steps=recomputed_steps,
        recomputed_samples=recomputed_samples,
        result_steps=result_steps,
        checksums_compared=ledger.order is not None,
    )


class _LineageAuditor:
    """Hands the final lineage's steps to one epoch's auditor after the other."""

    def __init__(self, order: DataOrder | None) -> None:
        self.missing_epochs: list[tuple[int, int]] = []
        self.stray_steps: list[tuple[int, int]] = []
        self._order = order
        self._done: list[EpochAudit] = []
        self._current: EpochAuditor | None = None
        self._version = 0

    def add(self, entry: LedgerEntry) -> None:
        reached = -1 if self._current is None else self._current.epoch
        if entry.epoch < reached:
            self.stray_steps.append((entry.epoch, entry.step))
            return
        if self._current is None or entry.epoch > reached:
            if self._current is not None:
                self._done.append(self._current.report(is_last=False))
            if entry.epoch > reached + 1:
                self.missing_epochs.append((reached + 1, entry.epoch - 1))
            self._current = self._begin(entry.epoch)
        self._current.add(entry, in_turn=entry.version > self._version)
        self._version = max(self._version, entry.version)

    def finish(self) -> tuple[EpochAudit, ...]:
        last = [] if self._current is None else [self._current.report(is_last=True)]
        return (*self._done, *last)

    def _begin(self, epoch: int) -> EpochAuditor:
        if self._order is not None:
            return OrderedEpochAuditor(epoch, self._order)
        before = self._current
        return StreamEpochAuditor(epoch, before.end if isinstance(before, StreamEpochAuditor) else 0)


def _result_steps(run: RunDirectory) -> int | None:
    try:
        result = json.loads(run.result.read_bytes())
        steps = result["steps"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"{run.result} cannot be read as a result: {error!r}") from error
    if type(steps) is not int:
        raise RunDirectoryError(f"{run.result}: steps must be a whole number, but is {steps!r}.")
    return steps
