"""One driver's part of the measurement: for each operation and size, time it and check every result."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.insight.bench.communication.collectives import (
    COLLECTIVES,
    ELEMENT_BYTES,
    Collective,
    Op,
    pattern,
)
from paceline.insight.bench.communication.engines import Engine

_ROUND_BYTES = 64 * 2**20
"""As many repetitions follow each other without a pause as their buffers fit into this."""


@dataclass(frozen=True)
class CollectiveTiming:
    """One operation at one size.

    Attributes:
        op: its name.
        size: bytes, as nccl-tests counts them: the whole buffer, over all its parts.
        time_us: mean of a call, over repetitions and ranks.
        algbw_gbps: size over time, in GB/s (10^9 bytes).
        busbw_gbps: that times the operation's factor.
        wrong: elements with another value than they must have, over all repetitions and ranks.
        checked: elements that were looked at.
    """

    op: Op
    size: int
    time_us: float
    algbw_gbps: float
    busbw_gbps: float
    wrong: int
    checked: int


def measure(
    engine: Engine, ops: Sequence[Op], sizes: Sequence[int], *, iterations: int, warmup: int
) -> Iterator[CollectiveTiming]:
    """Measure all operations at all sizes; every driver calls it alike and gets the same.

    Args:
        engine: this driver's.
        ops: what to run.
        sizes: bytes.
        iterations: timed repetitions of each; all are checked.
        warmup: repetitions before those.
    """
    for op in ops:
        collective = COLLECTIVES[op]
        # Small sizes of many ranks can come out as the same number of elements.
        counts = dict.fromkeys(collective.elements(size, engine.ranks) for size in sizes)
        for elements in counts:
            yield _measure_one(engine, collective, elements, iterations, warmup)


def _measure_one(
    engine: Engine, collective: Collective, elements: int, iterations: int, warmup: int
) -> CollectiveTiming:
    size = elements * ELEMENT_BYTES
    in_a_row = max(1, min(iterations, _ROUND_BYTES // (2 * size)))
    rounds = -(-iterations // in_a_row)
    slots = [_BufferSlot(engine, collective, elements) for _ in range(in_a_row)]
    for repetition in range(warmup):
        slots[0].fill(repetition)
        slots[0].run()
    engine.synchronize()
    seconds, wrong = 0.0, 0
    for round_ in range(rounds):
        for number, slot in enumerate(slots):
            slot.fill(round_ * in_a_row + number)
        engine.synchronize()
        engine.sums([0.0])  # begin together
        started = time.perf_counter()
        for slot in slots:
            slot.run()
        engine.synchronize()
        seconds += time.perf_counter() - started
        wrong += sum(slot.wrong() for slot in slots)
    calls = rounds * in_a_row
    drivers = engine.ranks // len(engine.local)
    total_s, total_wrong = engine.sums([seconds / calls, float(wrong)])
    mean_s = total_s / drivers
    algbw = size / mean_s / 1e9
    return CollectiveTiming(
        op=collective.op,
        size=size,
        time_us=mean_s * 1e6,
        algbw_gbps=algbw,
        busbw_gbps=algbw * collective.bus_factor(engine.ranks),
        wrong=round(total_wrong),
        checked=calls * engine.ranks * collective.target_elements(elements, engine.ranks),
    )


class _BufferSlot:
    """The buffers of one repetition, for the ranks of one driver."""

    def __init__(self, engine: Engine, collective: Collective, elements: int) -> None:
        self._engine = engine
        self._collective = collective
        self._given = collective.source_elements(elements, engine.ranks)
        received = collective.target_elements(elements, engine.ranks)
        self._targets = [torch.empty(received, device=device) for device in engine.devices]
        self._sources = (
            self._targets
            if collective.in_place
            else [torch.empty(self._given, device=device) for device in engine.devices]
        )
        self._repetition = 0

    def fill(self, repetition: int) -> None:
        """Write what each rank gives, and nothing that could be taken for a result."""
        self._repetition = repetition
        for rank, source, target in zip(self._engine.local, self._sources, self._targets, strict=True):
            target.fill_(torch.nan)
            source.copy_(self._collective.given(self._base(source.device), rank))

    def run(self) -> None:
        """Run the collective once."""
        self._engine.run(self._collective.op, self._sources, self._targets)

    def wrong(self) -> int:
        """How many elements are not what they must be."""
        return sum(
            int((target != self._collective.expected(self._base(target.device), rank, self._engine.ranks)).sum())
            for rank, target in zip(self._engine.local, self._targets, strict=True)
        )

    def _base(self, device: torch.device) -> torch.Tensor:
        return pattern(self._given, self._repetition, device)
