"""A module's buffers over the shards of a step (batch norm's running statistics, counters)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from paceline.errors import TaskError


class ShardedBuffers:
    """Lets every shard start from the step's base values, and takes the mean of what they made.

    A floating-point buffer becomes the mean over the shards, weighted by their samples; one that
    no shard changed (a mask, a table) is left untouched, bit for bit. An integer buffer changes by
    the mean of the shards' changes: a counter rises by one a step.

    ``counts`` is an int64 vector: the shards present, then for each floating-point buffer how many
    shards changed it.

    Where forwards of several shards come before the first one's backward, each forward is put between
    :meth:`lend` and :meth:`take_back`, and :meth:`give_back` comes before :meth:`add_to`.

    Args:
        module: whose buffers are meant.
        holds: says of a buffer whether it is one of them.
    """

    def __init__(self, module: nn.Module, holds: Callable[[torch.Tensor], bool] = lambda _: True) -> None:
        places: dict[int, tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = {}
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None and holds(buffer):
                    places.setdefault(id(buffer), (owner._buffers, name, buffer))
        self._floats = [place for place in places.values() if place[2].is_floating_point()]
        self._integers = [
            place for place in places.values() if not (place[2].is_floating_point() or place[2].is_complex())
        ]
        self.floats = [buffer for _, _, buffer in self._floats]
        self.integers = [buffer for _, _, buffer in self._integers]
        self.counts = torch.zeros(
            1 + len(self.floats) if self.floats or self.integers else 0, dtype=torch.int64
        )
        self._float_base: list[torch.Tensor] = []
        self._integer_base: list[torch.Tensor] = []

    def begin(self) -> None:
        """Remember the values that every shard of the step starts from."""
        self._float_base = [buffer.clone() for buffer in self.floats]
        self._integer_base = [buffer.to(torch.int64, copy=True) for buffer in self.integers]

    def abandon(self) -> None:
        """Go back to the base values of a step that is not finished; does nothing after :meth:`assign`."""
        if self._float_base:
            self._restore(self._floats, self._float_base)
        if self._integer_base:
            self._restore(self._integers, self._integer_base)
        self._float_base, self._integer_base = [], []

    def reset(self) -> None:
        """Go back to the base values of the step under way."""
        self._restore(self._floats, self._float_base)
        self._restore(self._integers, self._integer_base)

    def lend(self) -> None:
        """Have the next forward write to tensors of its own: an earlier one's backward reads the others."""
        for owner, name, buffer in (*self._floats, *self._integers):
            owner[name] = buffer.clone()

    def take_back(self) -> list[torch.Tensor]:
        """What the forward left; the buffers are those of the step's base again."""
        places = (*self._floats, *self._integers)
        left = [_current(place) for place in places]
        for place in places:
            _bind(place)
        return left

    def give_back(self, left: Sequence[torch.Tensor]) -> None:
        """Have the buffers be what a forward left."""
        for (owner, name, _), value in zip((*self._floats, *self._integers), left, strict=True):
            owner[name] = value

    def add_to(
        self,
        float_sums: Sequence[torch.Tensor],
        integer_sums: Sequence[torch.Tensor],
        counts: torch.Tensor,
        samples: int,
        *,
        reset: bool,
    ) -> None:
        """Add one shard's contribution, and go back to the base values if another shard follows."""
        if not counts.numel():
            return
        changed = [1]
        if self.floats:
            values = [_current(place) for place in self._floats]
            # By value: batch norm does not raise its statistics' version counters.
            changed += [
                int(not torch.equal(v, base)) for v, base in zip(values, self._float_base, strict=True)
            ]
            # Half-precision buffers are summed in float32, where sums neither overflow nor lose digits.
            values = [value.to(total.dtype) for value, total in zip(values, float_sums, strict=True)]
            # Multiplied first: a fused multiply-add would round a lone shard differently from a pair.
            torch._foreach_add_(list(float_sums), torch._foreach_mul(values, float(samples)))
        if self.integers:
            now = [_current(place).to(torch.int64) for place in self._integers]
            torch._foreach_add_(list(integer_sums), torch._foreach_sub(now, self._integer_base))
        counts.add_(torch.tensor(changed, device=counts.device))
        if reset:
            self.reset()

    def assign(
        self,
        float_sums: Sequence[torch.Tensor],
        integer_sums: Sequence[torch.Tensor],
        counts: torch.Tensor,
        samples: float,
    ) -> None:
        """Set the buffers to the step's values."""
        if not counts.numel():
            return
        shards, *changed = counts.tolist()
        for place, total, times in zip(self._floats, float_sums, changed, strict=True):
            if times:
                _assign(place, total.div_(samples))
            else:
                _bind(place)
        for place, base, total in zip(self._integers, self._integer_base, integer_sums, strict=True):
            _assign(place, base + total.div_(shards, rounding_mode="floor"))
        self._float_base, self._integer_base = [], []

    def _restore(
        self,
        places: Sequence[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]],
        base: Sequence[torch.Tensor],
    ) -> None:
        for place, value in zip(places, base, strict=True):
            _assign(place, value)


def _current(place: tuple[dict[str, torch.Tensor | None], str, torch.Tensor]) -> torch.Tensor:
    """The buffer's value now; the module may have bound another tensor to its name."""
    owner, name, buffer = place
    value = owner[name]
    if value is None:
        return buffer
    if value.shape != buffer.shape:
        raise TaskError(
            f"buffer {name!r} had shape {tuple(buffer.shape)} and got {tuple(value.shape)} in forward; "
            "buffers are averaged over the shards and must keep their shape. Make it a plain attribute."
        )
    return value.detach()


def _assign(place: tuple[dict[str, torch.Tensor | None], str, torch.Tensor], value: torch.Tensor) -> None:
    place[2].copy_(value)
    _bind(place)


def _bind(place: tuple[dict[str, torch.Tensor | None], str, torch.Tensor]) -> None:
    owner, name, buffer = place
    owner[name] = buffer
