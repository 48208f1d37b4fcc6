"""How many bytes of tensors live at once, on fake tensors as on real ones, and whose they are."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


class LiveBytes(TorchDispatchMode):
    """While it is entered, counts the storages that operators make, until nobody holds them.

    A storage counts once, however many views it has.

    Attributes:
        now: bytes of the storages that live.
        peak: the most that ``now`` has been.
        owner: whoever computes; what is made and counted is theirs.
        events: (owner, bytes more or less), in order.
        flops: by owner: of matrix products, convolutions and attention.

    Args:
        known: tensors that were there before, and do not count.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.owner = 0
        self.events: list[tuple[int, int]] = []
        self.flops: dict[int, int] = {}
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._living: set[weakref.ref[Any]] = set()
        for tensor in known:
            self._seen.add(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        counted = _FLOPS.get(func._overloadpacket)
        if counted is not None:
            flops = int(counted(*args, **kwargs, out_val=result))
            self.flops[self.owner] = self.flops.get(self.owner, 0) + flops
        if isinstance(result, torch.Tensor):  # nearly always: and models have many operators
            self._count(result.untyped_storage())
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        self._change(self.owner, storage.nbytes())
        self.peak = max(self.peak, self.now)
        gone = partial(self._gone, self.owner, storage.nbytes())
        self._living.add(weakref.ref(storage, gone))

    def _gone(self, owner: int, nbytes: int, reference: weakref.ref[Any]) -> None:
        self._living.discard(reference)
        self._change(owner, -nbytes)

    def _change(self, owner: int, nbytes: int) -> None:
        self.now += nbytes
        self.events.append((owner, nbytes))


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    flops = sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)  # type: ignore[no-untyped-call]
    return int(flops)


# What attention is on the CPU; torch counts only what it is on a GPU.
_FLOPS: dict[Any, Any] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
