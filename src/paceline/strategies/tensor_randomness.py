"""Randomness in the parts of a model where each rank of a tensor-parallel copy holds other features."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from paceline.data.permutation import derive_key

_TAG = 15  # beside those of paceline.training.randomness


class PartedRandomness:
    """Has the ranks draw different numbers where they hold different parts, and else the same.

    All ranks of a copy begin a shard with the same generator. From a layer that splits its output to the
    one that takes the parts in, each goes on with a generator of its own, which follows from where the
    common one stands, from the layer and from the rank; then with the common one, as if nothing had been
    drawn. So what is drawn outside of split parts is what one process draws.

    Args:
        module: the model.
        begins: the layers whose output is split.
        ends: the layers that take a split input in.
        rank: among the ranks that share the layers.
        everywhere: activations are split (along the sequence) in all of the model.
    """

    def __init__(
        self,
        module: nn.Module,
        begins: Iterable[nn.Module],
        ends: Iterable[nn.Module],
        rank: int,
        *,
        everywhere: bool,
    ) -> None:
        self._rank = rank
        self._common: list[torch.Tensor] = []
        if everywhere:
            module.register_forward_pre_hook(lambda *_: self._part(0))
            module.register_forward_hook(lambda *_: self._join(), always_call=True)
            return
        module.register_forward_pre_hook(lambda *_: self._common.clear())
        for number, layer in enumerate(begins):
            layer.register_forward_hook(self._after(number))
        for layer in ends:
            layer.register_forward_pre_hook(lambda *_: self._join())

    def _after(self, number: int) -> Any:
        return lambda layer, *_: self._part(number) if layer.training and not self._common else None

    def _part(self, number: int) -> None:
        self._common = [torch.get_rng_state()]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._common.append(torch.cuda.get_rng_state())
        digest = hashlib.blake2b(digest_size=8)
        for state in self._common:
            digest.update(state.numpy().tobytes())
        key = derive_key(int.from_bytes(digest.digest(), "little") >> 1, _TAG, number, self._rank)
        # torch.manual_seed() also looks for every other kind of accelerator.
        torch.default_generator.manual_seed(key)
        if len(self._common) > 1:
            torch.cuda.manual_seed(key)

    def _join(self) -> None:
        if self._common:
            torch.set_rng_state(self._common[0])
            for state in self._common[1:]:
                torch.cuda.set_rng_state(state)
            self._common.clear()
