"""Requests that all ranks obey after a step."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, fields

from paceline.core.errors import RESTART_EXIT_CODE
from paceline.parallel.load_balancing import SPEED_WIDTH
from paceline.runs.metrics import STATUS_WIDTH

# --- Control flags: they carry each rank's own decisions to all ranks ---
#
# A signal, the end of --walltime, a save that is due by the clock or the end of a stream is seen by one
# rank at its own time. Each puts it into its row of the step's reduction; after the step all ranks read
# the same rows, and obey alike.


WALLTIME = 1000
"""The stop cause of ``--walltime``, above all numbers of signals."""

TRIAL_SCHEDULER = 1001
"""The stop cause of a trial scheduler that ends this trial; see :mod:`paceline.training.trial_scheduler`."""

_CAUSES = {WALLTIME: "walltime", TRIAL_SCHEDULER: "the search"}

_NO_STATUS = [0.0] * STATUS_WIDTH
_NO_SPEED = [0.0] * SPEED_WIDTH


@dataclass(frozen=True)
class ControlFlags:
    """The control flags of one rank, or the merged ones of all.

    Attributes:
        stop: the number of the signal that asks for a stop, or ``WALLTIME``; 0 for none.
        save: a save is due by the clock.
        has_next_batch: there is another step's data in this epoch (streams; else always true).
        reform: the ranks shall leave their group after this step, for another one.
        computed, recomputed: fingerprints of the gradient that is verified in this step: of the rank that has its
            micro-batch, and of another one; 0 elsewhere.
        impure: the purity guard found something that the ranks have to settle.
        samples_fingerprint: of some samples, as this rank reads them; 0 if it does not know. Merged: negative if two
            ranks have different ones.
    """

    stop: int = 0
    save: bool = False
    has_next_batch: bool = True
    reform: bool = False
    computed: int = 0
    recomputed: int = 0
    impure: bool = False
    samples_fingerprint: int = 0

    def row(self, status: Sequence[float] | None = None, speed: Sequence[float] | None = None) -> list[float]:
        """Return the rank's row, with its status if a record is due, and its speed if it has a measurement."""
        return [
            *map(float, vars(self).values()),
            *(_NO_STATUS if status is None else status),
            *(_NO_SPEED if speed is None else speed),
        ]


_CONTROL_WIDTH = len(fields(ControlFlags))
ROW_LENGTH = _CONTROL_WIDTH + STATUS_WIDTH + SPEED_WIDTH
"""Numbers in a rank's row: the control flags, then its status and its speed."""


def merge(rows: Sequence[Sequence[float]]) -> ControlFlags:
    """Merge the control flags that all ranks obey; without any row, no flag is set."""
    if not rows:
        return ControlFlags()
    *columns, samples = zip(*(map(int, row[:_CONTROL_WIDTH]) for row in rows), strict=True)
    stop, save, has_next_batch, reform, computed, recomputed, impure = map(max, columns)
    known = {fingerprint for fingerprint in samples if fingerprint}
    return ControlFlags(
        stop=stop,
        save=bool(save),
        has_next_batch=bool(has_next_batch),
        reform=bool(reform),
        computed=computed,
        recomputed=recomputed,
        impure=bool(impure),
        samples_fingerprint=-1 if len(known) > 1 else max(known, default=0),
    )


def statuses(rows: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Return each rank's status."""
    return [row[_CONTROL_WIDTH:-SPEED_WIDTH] for row in rows]


def speeds(rows: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Return each rank's speed."""
    return [row[-SPEED_WIDTH:] for row in rows]


def exit_code(stop: int) -> int:
    """Return the exit code of a stopped run: 130 after Ctrl-C, else 75, "run me again"."""
    return 130 if stop == signal.SIGINT else RESTART_EXIT_CODE


def cause(stop: int) -> str:
    """Return the cause of a stop request: "walltime", "the search", or the signal's name."""
    return _CAUSES.get(stop) or signal.Signals(stop).name
