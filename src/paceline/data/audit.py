"""The audit: proves from ledgers that each sample was seen as often as required."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import RunDirectoryError
from paceline.core.files import parse_json, read_document
from paceline.data.ledger import LedgerEntry, read_ledger
from paceline.data.order import DeterministicSampler, restore_order

if TYPE_CHECKING:
    from paceline.runs.directory import RunDirectory


# --- One epoch of the audit ---


_CHUNK = 1 << 16  # positions to recompute at a time
_SHOWN_RANGES = 8  # ranges of steps in a message

Ranges = tuple[tuple[int, int], ...]
"""Ranges of step or epoch numbers, first and last included."""


@dataclass(frozen=True)
class EpochAudit:
    """The audit of one epoch.

    Attributes:
        num_samples: N, or None for a stream, whose length is unknown.
        steps: committed steps, each counted once.
        once: samples seen exactly once.
        repeated: samples seen twice or more.
        never: samples of past steps that were not seen.
        not_yet: samples of future steps; 0 except in a run's last epoch.
        repeated_steps: steps committed more than once.
        misplaced_steps: steps outside the epoch, with other positions than the order gives them, or out of sequence.
        checksum_mismatches: steps that read other samples than the order gives them.
    """

    epoch: int
    num_samples: int | None
    steps: int
    once: int
    repeated: int
    never: int
    not_yet: int
    missing_steps: Ranges
    repeated_steps: Ranges
    misplaced_steps: Ranges
    checksum_mismatches: Ranges
    world_sizes: tuple[int, ...]

    @property
    def findings(self) -> tuple[str, ...]:
        """The errors, one phrase each."""
        steps = (
            (self.missing_steps, "missing"),
            (self.repeated_steps, "repeated"),
            (self.misplaced_steps, "misplaced"),
            (self.checksum_mismatches, "read other samples than the order gives"),
        )
        phrases = [f"{_name_steps(ranges)} {what}" for ranges, what in steps if ranges]
        if self.never:
            phrases.append(f"{self.never:,} samples never seen")
        if self.repeated:
            phrases.append(f"{self.repeated:,} samples seen twice or more")
        return tuple(f"epoch {self.epoch}: {phrase}" for phrase in phrases)


class EpochAuditor:
    """Audits the committed steps of one epoch, in the order of the ledger."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._sequence = _StepSequence()
        self._world_sizes: set[int] = set()

    def add(self, entry: LedgerEntry, *, in_turn: bool) -> None:
        """Add a step; ``in_turn`` says whether its state version exceeds all earlier ones."""
        raise NotImplementedError

    def report(self, *, is_last: bool) -> EpochAudit:
        """Return the result; the last epoch of a run may be unfinished."""
        raise NotImplementedError

    def _report(
        self, num_samples: int | None, *, once: int, repeated: int, never: int, not_yet: int, mismatches: Iterable[int]
    ) -> EpochAudit:
        return EpochAudit(
            epoch=self.epoch,
            num_samples=num_samples,
            once=once,
            repeated=repeated,
            never=never,
            not_yet=not_yet,
            steps=self._sequence.count,
            missing_steps=tuple(self._sequence.missing),
            repeated_steps=_as_ranges(self._sequence.repeated),
            misplaced_steps=_as_ranges(self._sequence.misplaced),
            checksum_mismatches=_as_ranges(mismatches),
            world_sizes=tuple(sorted(self._world_sizes)),
        )


class OrderedEpochAuditor(EpochAuditor):
    """Audits an epoch of a map-style dataset: recomputes every sample number.

    Memory: one bit per sample, two if samples repeat; independent of the number of correct steps.

    Raises:
        RunDirectoryError: there is not enough memory.
    """

    def __init__(self, epoch: int, order: DeterministicSampler) -> None:
        super().__init__(epoch)
        self._order = order
        self._seen = _Bitmap(order.num_samples)
        self._end = 0  # the position after the furthest well-placed step
        self._mismatches: set[int] = set()
        self._pending: list[LedgerEntry] = []

    def add(self, entry: LedgerEntry, *, in_turn: bool) -> None:
        """Add a step; mark the samples of a misplaced one at the positions that it claims."""
        self._world_sizes.add(entry.world_size)
        known = entry.step < self._order.steps_per_epoch
        if not known or (entry.start, entry.stop) != self._order.batch_range(entry.step):
            self._sequence.misplaced.add(entry.step)
            for start in range(entry.start, min(entry.stop, self._order.num_samples), _CHUNK):
                stop = min(start + _CHUNK, entry.stop, self._order.num_samples)
                self._mark(start, stop, self._order.indices(self.epoch, start, stop))
            return
        self._sequence.take(entry.step, in_turn=in_turn)
        self._end = max(self._end, entry.stop)
        if self._pending and self._pending[-1].stop != entry.start:
            self._recompute()
        self._pending.append(entry)
        if entry.stop - self._pending[0].start >= _CHUNK:
            self._recompute()

    def report(self, *, is_last: bool) -> EpochAudit:
        self._recompute()
        num_samples = self._order.num_samples
        seen, repeated = self._seen.counts()
        not_yet = min(num_samples - self._end, num_samples - seen) if is_last else 0
        if not is_last:
            self._sequence.end_at(self._order.steps_per_epoch)
        never = num_samples - seen - not_yet
        return self._report(
            num_samples,
            once=seen - repeated,
            repeated=repeated,
            never=never,
            not_yet=not_yet,
            mismatches=self._mismatches,
        )

    def _mark(self, start: int, stop: int, numbers: NDArray[np.int64]) -> None:
        """Mark positions and the samples there; a draw by weights is its position, since samples recur."""
        self._seen.mark(np.arange(start, stop, dtype=np.int64) if self._order.is_weighted else numbers)

    def _recompute(self) -> None:
        """Mark the samples of the pending, contiguous steps, and compare checksums."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        start = pending[0].start
        # Checksums are defined on '<i8'; a copy on big-endian machines only.
        numbers = self._order.indices(self.epoch, start, pending[-1].stop).astype("<i8", copy=False)
        self._mark(start, pending[-1].stop, numbers)
        content = numbers.data
        for entry in pending:
            bounds = self._order.microbatch_bounds(entry.step)
            if entry.checksum != sum(zlib.crc32(content[a - start : b - start]) for a, b in bounds):
                self._mismatches.add(entry.step)


class StreamEpochAuditor(EpochAuditor):
    """Audits an epoch of a stream by positions, because its samples have no numbers.

    Args:
        start: the end of the previous epoch, counted from the start of the run. Steps missing at an epoch's end are
            therefore detected at the beginning of the next one.

    Attributes:
        end: the position after the furthest step.
    """

    def __init__(self, epoch: int, start: int) -> None:
        super().__init__(epoch)
        self._start = start
        self.end = start
        self._never = 0
        self._repeated = 0

    def add(self, entry: LedgerEntry, *, in_turn: bool) -> None:
        """Add a step, whose positions should begin at the previous step's end."""
        self._world_sizes.add(entry.world_size)
        self._sequence.take(entry.step, in_turn=in_turn)
        if entry.start != self.end:
            self._sequence.misplaced.add(entry.step)
        self._never += max(0, entry.start - self.end)
        self._repeated += max(0, min(entry.stop, self.end) - entry.start)
        self.end = max(self.end, entry.stop)

    def report(self, *, is_last: bool) -> EpochAudit:
        once = self.end - self._start - self._never - self._repeated
        return self._report(None, once=once, repeated=self._repeated, never=self._never, not_yet=0, mismatches=())


class _StepSequence:
    """The set of steps seen, out of 0, 1, 2, ...; its size grows only with errors."""

    def __init__(self) -> None:
        self.missing: list[tuple[int, int]] = []
        self.repeated: set[int] = set()
        self.misplaced: set[int] = set()
        self._next = 0

    @property
    def count(self) -> int:
        """Distinct steps."""
        return self._next - sum(last - first + 1 for first, last in self.missing)

    def take(self, step: int, *, in_turn: bool) -> None:
        if step >= self._next:
            self._skip_to(step)
            self._next = step + 1
        elif self._fill_gap(step):
            in_turn = False
        else:
            self.repeated.add(step)
            return
        if not in_turn:
            self.misplaced.add(step)

    def end_at(self, num_steps: int) -> None:
        """Count missing steps up to the epoch's last."""
        self._skip_to(num_steps)

    def _skip_to(self, step: int) -> None:
        if step > self._next:
            self.missing.append((self._next, step - 1))
            self._next = step

    def _fill_gap(self, step: int) -> bool:
        """Remove a late step from the missing ones; return whether it was among them."""
        for number, (first, last) in enumerate(self.missing):
            if first <= step <= last:
                rest = ((first, step - 1), (step + 1, last))
                self.missing[number : number + 1] = [(a, b) for a, b in rest if a <= b]
                return True
        return False


class _Bitmap:
    """Marks sample numbers: one bit for seen and, allocated when needed, a second for seen again."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._seen = self._allocate()
        self._repeated: NDArray[np.uint8] | None = None

    def mark(self, numbers: NDArray[np.int64]) -> None:
        ordered = np.sort(numbers)
        byte, bit = ordered >> 3, np.left_shift(1, ordered & 7).astype(np.uint8)
        again = (self._seen[byte] & bit) != 0
        again[1:] |= ordered[1:] == ordered[:-1]
        if again.any():
            if self._repeated is None:
                self._repeated = self._allocate()
            np.bitwise_or.at(self._repeated, byte[again], bit[again])
        np.bitwise_or.at(self._seen, byte, bit)

    def counts(self) -> tuple[int, int]:
        """Return how many numbers were marked, and how many of them more than once."""
        return _popcount(self._seen), 0 if self._repeated is None else _popcount(self._repeated)

    def _allocate(self) -> NDArray[np.uint8]:
        try:
            return np.zeros(-(-self._size // 64) * 8, dtype=np.uint8)
        except MemoryError:
            raise RunDirectoryError(
                f"the audit needs {self._size / 2**33:,.1f} GiB of memory, one bit for each of the epoch's "
                f"{self._size:,} samples. Run it on a larger node."
            ) from None


def _popcount(bits: NDArray[np.uint8]) -> int:
    # As 64-bit words, so that the counts take an eighth of the bitmap.
    return int(np.bitwise_count(bits.view(np.uint64)).sum(dtype=np.int64))


def _as_ranges(numbers: Iterable[int]) -> Ranges:
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return tuple(ranges)


def _name_steps(ranges: Ranges) -> str:
    """Format ranges, such as "3 steps (5, 9 to 10)"."""
    count = sum(last - first + 1 for first, last in ranges)
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in ranges[:_SHOWN_RANGES]]
    if len(ranges) > _SHOWN_RANGES:
        shown.append("...")
    return f"{count:,} step{'s' if count > 1 else ''} ({', '.join(shown)})"


# --- The audit of a run ---
#
# For each committed step of the final lineage, the audit recomputes the sample numbers from the order of the data,
# compares their CRC-32s with the ledger's, which are of the fetched samples, and marks every sample. That takes N / 8
# bytes for an epoch (twice that if samples repeat) and 0.1 to 0.3 us per sample.


_SHOWN = 6  # findings in the verdict; all are in the report


@dataclass(frozen=True)
class AuditReport:
    """The audit of a run.

    Attributes:
        epochs: the epochs with steps in the final lineage.
        missing_epochs: earlier epochs without steps.
        stray_steps: (epoch, step) of steps committed after a later epoch had begun.
        generations: number of ledger files, one per start of the run.
        recomputed_steps: steps that a restart undid, so they were or will be recomputed; they count in no epoch.
        recomputed_samples: the samples of those steps.
        result_steps: the number of steps in ``result.json``, or None.
        checksums_compared: False for a stream, whose sample numbers cannot be recomputed.
        is_weighted: the task's weights drew the samples; the counts are of draws, not of different samples.
        units: what all samples of an epoch together contain once, as the dataset declares it, such as documents; of a
            stream, what those of the committed steps hold.
    """

    epochs: tuple[EpochAudit, ...]
    missing_epochs: Ranges
    stray_steps: tuple[tuple[int, int], ...]
    generations: int
    recomputed_steps: int
    recomputed_samples: int
    result_steps: int | None
    checksums_compared: bool
    is_weighted: bool
    units: dict[str, int]

    @property
    def steps(self) -> int:
        """Steps of the final lineage, each counted once."""
        return sum(epoch.steps for epoch in self.epochs)

    @property
    def findings(self) -> tuple[str, ...]:
        """The errors, one phrase each."""
        phrases = [phrase for epoch in self.epochs for phrase in epoch.findings]
        phrases += [f"epoch{f' {a}' if a == b else f's {a} to {b}'}: no steps" for a, b in self.missing_epochs]
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
        """The result in one sentence."""
        if not self.clean:
            more = len(self.findings) - _SHOWN
            shown = [*self.findings[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
            return f"Not clean: {'; '.join(shown)}."
        if not self.epochs:
            return "Clean, but empty: no step has been committed yet."
        units = ", ".join(f"{count:,} {unit}" for unit, count in self.units.items())
        if not self.checksums_compared:
            hold = f" They hold {units}, each at most once in a pass over their source." if units else ""
            return (
                f"Clean: {sum(epoch.once for epoch in self.epochs):,} samples were taken from this stream, and its "
                f"{self.steps:,} steps follow each other without a gap or an overlap.{hold} Which samples these were, "
                "and whether they are all, was not checked: a stream's samples have no numbers."
            )
        last = self.epochs[-1]
        whole = len(self.epochs) - (1 if last.not_yet else 0)
        what, done = ("weighted draw", "made") if self.is_weighted else ("sample", "seen")
        parts = [f"every {what} of {whole} epoch{'s' if whole > 1 else ''}"] if whole else []
        if last.not_yet:
            parts.append(f"{last.once:,} of the {last.num_samples:,} {what}s of epoch {last.epoch}")
        together = "Together they" if whole else "The samples of an epoch"
        each = f" {together} are {units}, each once an epoch." if units else ""
        return f"Clean{' so far' if last.not_yet else ''}: {' and '.join(parts)} {done} exactly once.{each}"

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        summary = {"clean": self.clean, "verdict": self.verdict, "steps": self.steps}
        return {**summary, **dataclasses.asdict(self)}


def audit(run: RunDirectory) -> AuditReport:
    """Audit a run, which may still be running.

    Raises:
        RunDirectoryError: this is not a run, it has no ledger, or the ledger is malformed.
    """
    units = run.read_manifest().get("data", {}).get("train_units", {})
    # Read before the ledger, because an active run writes the ledger first and the result last.
    result_steps = _result_steps(run)
    ledger = read_ledger(run.ledger)
    restore = cache(lambda order: restore_order(order, run))
    order = restore(ledger.order)
    lineage = _LineageAuditor(lambda entry: restore(ledger.order_of(entry)))
    recomputed_steps = recomputed_samples = counted = 0
    for entry, final in ledger.entries():
        if final:
            lineage.add(entry)
            counted += entry.checksum
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
        checksums_compared=order is not None,
        is_weighted=order is not None and order.is_weighted,
        units=units if order is not None else dict.fromkeys(units, counted),
    )


class _LineageAuditor:
    """Splits the final lineage into epochs and audits each."""

    def __init__(self, order_of: Callable[[LedgerEntry], DeterministicSampler | None]) -> None:
        self.missing_epochs: list[tuple[int, int]] = []
        self.stray_steps: list[tuple[int, int]] = []
        self._order_of = order_of
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
            self._current = self._begin(entry)
        self._current.add(entry, in_turn=entry.version > self._version)
        self._version = max(self._version, entry.version)

    def finish(self) -> tuple[EpochAudit, ...]:
        last = [] if self._current is None else [self._current.report(is_last=True)]
        return (*self._done, *last)

    def _begin(self, first: LedgerEntry) -> EpochAuditor:
        order = self._order_of(first)  # the batch of a fork begins with an epoch
        if order is not None:
            return OrderedEpochAuditor(first.epoch, order)
        before = self._current
        return StreamEpochAuditor(first.epoch, before.end if isinstance(before, StreamEpochAuditor) else 0)


def _result_steps(run: RunDirectory) -> int | None:
    try:
        result = parse_json(read_document(run.result))
        steps = result["steps"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(f"{run.result} cannot be read as a result: {error!r}") from error
    if type(steps) is not int:
        raise RunDirectoryError(f"{run.result}: steps must be a whole number, but is {steps!r}.")
    return steps
