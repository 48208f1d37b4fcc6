"""The collectives: what each sends and must receive, and what its bandwidth means. No torch is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

Op = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "p2p"]

ELEMENT_BYTES = 4
"""All data are float32, and whole numbers so small that their sums are exact in any order."""

_PERIOD = 13
_SHIFT = 7

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}iB": 1024**_power, f"{_letter}B": 1000**_power}


@dataclass(frozen=True)
class Collective:
    """One operation of ``size`` bytes over n ranks.

    Attributes:
        op: its name.
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
        """What a rank gives."""
        return elements // ranks if self.op == "all_gather" else elements

    def target_elements(self, elements: int, ranks: int) -> int:
        """What a rank receives."""
        return elements // ranks if self.op == "reduce_scatter" else elements

    def given(self, base: torch.Tensor, rank: int) -> torch.Tensor:
        """What a rank gives: a pattern that is shifted by its number.

        Args:
            base: the pattern of this repetition, of :meth:`source_elements`.
            rank: who gives.
        """
        return base + rank

    def expected(self, base: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        """What a rank must receive, of :meth:`target_elements`."""
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

    numbers = torch.arange(elements, device=device).remainder_(_PERIOD).add_(_SHIFT * repetition)
    return numbers.remainder_(_PERIOD).to(torch.float32)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes of ``8B:256MiB``, doubling from the first to the last; of ``1MiB`` that alone.

    Raises:
        ConfigError: the text has another form.
    """
    least, colon, most = text.partition(":")
    first, last = _bytes(least, text), _bytes(most if colon else least, text)
    if not 0 < first <= last:
        raise ConfigError(f"--sizes must go from a smaller size to a larger one, but is {text!r}.")
    return tuple(_doubled(first, last))


def _doubled(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def _bytes(word: str, text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", word.strip())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(f"--sizes must be such as 8B:256MiB or 1MiB (B, KiB, MiB, GiB, KB, MB, GB), but is {text!r}.")
    return int(match[1]) * _UNITS[match[2]]
