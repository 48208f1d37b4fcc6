"""The parts of a model that FSDP gathers one at a time, and that recompute their activations."""

from __future__ import annotations

import random
import re
import types
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from paceline.core.errors import ConfigError

# --- Which modules of a model are a block: what is gathered, or computed again, as one ---


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


def wrap_units(module: nn.Module, wrap: str, option: str = "--fsdp-wrap") -> list[nn.Module]:
    """The modules below ``module`` that are one block each, inner ones first.

    Args:
        module: the model.
        wrap: "whole", class names with commas, or a number of parameters such as 1M: the smallest modules
            that hold so many.
        option: where ``wrap`` was given.

    Raises:
        ConfigError: ``wrap`` is none of its forms, or names a class that the model does not have.
    """
    if wrap == "whole":
        return []
    size = re.fullmatch(r"(\d+)([KMG]?)", wrap)
    if size:
        return _by_size(module, int(size[1]) * _UNITS[size[2]])
    names = [name.strip() for name in wrap.split(",")]
    there = {type(child).__name__ for child in module.modules()}
    missing = [name for name in names if name not in there]
    if missing:
        raise ConfigError(
            f"{option} {wrap}: the model has no module of class {missing[0]}. It has: "
            f"{', '.join(sorted(there))}. Give a class, a number of parameters such as 1M, or whole."
        )
    found = [child for child in module.modules() if type(child).__name__ in names and child is not module]
    return list(reversed(found))


def repeated_units(module: nn.Module) -> list[nn.Module]:
    """The members of the model's lists that are made of modules themselves, such as a transformer's blocks.

    A list within a list is looked into; what is inside of a block is not.
    """
    found: list[nn.Module] = []
    for child in module.children():
        inside = repeated_units(child)
        composite = any(True for _ in child.children()) and any(True for _ in child.parameters())
        listed = isinstance(module, _LISTS) and composite and not isinstance(child, _NEVER_CALLED)
        if listed and not (isinstance(child, _LISTS) and inside):
            found.append(child)
        else:
            found += inside
    return found


def exclude_tied(module: nn.Module, found: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of the modules that share no parameter with what lies outside of them.

    A parameter that two modules share, each sharded by itself, would become two. What is dropped here is
    gathered with the smallest module around it that is not: its parameters are all there.

    Args:
        module: the model.
        found: modules below it, inner ones first.
    """
    everywhere = _places(module)
    times = Counter(id(child) for _, child in module.named_modules(remove_duplicate=False))
    kept: list[nn.Module] = []
    taken: set[int] = set()
    for child in found:
        own = {key: number for key, number in _places(child).items() if key not in taken}
        if all(times[id(child)] * number == everywhere[key] for key, number in own.items()):
            kept.append(child)
            taken |= own.keys()
    return kept


def _places(module: nn.Module) -> Counter[int]:
    """How often each parameter, by its identity, is in the tree of modules."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))


def _by_size(module: nn.Module, least: int) -> list[nn.Module]:
    """The smallest modules with at least so many parameters that no block inside has."""
    found: list[nn.Module] = []

    def visit(parent: nn.Module, is_root: bool) -> int:
        left = sum(parameter.numel() for parameter in parent.parameters(recurse=False))
        left += sum(visit(child, False) for child in parent.children())
        # What has no forward of its own is never called.
        if is_root or left < least or isinstance(parent, _NEVER_CALLED):
            return left
        found.append(parent)
        return 0

    visit(module, True)
    return found


# --- Activations that backward computes again instead of keeping them ---
#
# Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, by ``torch.utils.checkpoint``. What is
# computed again has the bits of the first time: its randomness and its buffers are what they were then, and
# the buffers are left as the first time made them (batch norm would count a batch twice). Blocks are not
# wrapped: parameters keep their names.


_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_aten = torch.ops.aten
_KEPT = frozenset(
    {
        *(_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default),
        *(_aten.convolution.default, _aten.mkldnn_convolution.default),
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""What selective checkpointing keeps: the operations that take longest to compute again."""


def checkpoint_activations(
    module: nn.Module, what: Literal["block", "selective"], wrap: str, *, to_the_end: bool = False
) -> None:
    """Have blocks of a model compute their activations again in backward.

    Args:
        module: the model.
        what: "block": all inside of a block is computed again; "selective": all but :data:`_KEPT`.
        wrap: which modules are blocks, as ``--checkpoint-blocks`` says.
        to_the_end: compute blocks again to their end, for the sake of hooks that go in pairs; else only until
            all that backward needs is there.

    Raises:
        ConfigError: the model has no such blocks.
    """
    chosen = repeated_units(module) if wrap == "auto" else wrap_units(module, wrap, "--checkpoint-blocks")
    if not chosen:
        there = sorted({type(child).__name__ for child in module.modules() if child is not module})
        raise ConfigError(
            f"--checkpoint-activations {what} finds no block in the model"
            + (", which has no list of composed modules" if wrap == "auto" else "")
            + f". Give --checkpoint-blocks with some of {', '.join(there)}, or a number of parameters."
        )
    for block in chosen:
        # A method of the block itself, so that a deep copy of the model is bound to its own parameters.
        how = _Checkpointed(selective=what == "selective", early_stop=not to_the_end)
        block.__dict__["forward"] = types.MethodType(how, block)


@dataclass(frozen=True)
class _Checkpointed:
    """A block's forward, by ``checkpoint``."""

    selective: bool
    early_stop: bool

    def __call__(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = partial(type(block).forward, block)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            context_fn=partial(self._contexts, block),
            early_stop=self.early_stop,
            **kwargs,
        )

    def _contexts(self, block: nn.Module) -> _Contexts:
        first = _FirstTime(block)
        again = _Again(first)
        if not self.selective:
            return first, again
        policy_first, policy_again = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
        return _Both(first, policy_first), _Both(again, policy_again)


def _policy(context: object, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class _FirstTime:
    """Remembers what a block's forward begins with: its buffers, and Python's and NumPy's randomness.

    ``checkpoint`` itself remembers torch's. All buffers are copied, as batch norm changes its statistics
    without raising their version.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self.buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self.random: tuple[Any, ...] = ()

    def __enter__(self) -> Self:
        self.buffers = [
            (owner, name, buffer.clone())
            for owner in self._block.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self.random = _random_state()
        return self

    def __exit__(self, *error: object) -> None:
        pass


class _Again:
    """What :class:`_FirstTime` remembered is there once more; afterwards all is as before."""

    def __init__(self, first: _FirstTime) -> None:
        self._first = first

    def __enter__(self) -> Self:
        self._random = _random_state()
        self._buffers = [(owner, name, owner._buffers[name]) for owner, name, _ in self._first.buffers]
        _set_random_state(self._first.random)
        for owner, name, before in self._first.buffers:
            owner._buffers[name] = before.clone()
        return self

    def __exit__(self, *error: object) -> None:
        for owner, name, buffer in self._buffers:
            owner._buffers[name] = buffer
        _set_random_state(self._random)


class _Both:
    """Two contexts as one."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts = contexts

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        for context in self._contexts:
            self._stack.enter_context(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _random_state() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()


def _set_random_state(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
