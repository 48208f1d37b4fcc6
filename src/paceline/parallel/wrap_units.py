"""Wrap units of a model: modules that FSDP gathers together, or that recompute their activations together."""

from __future__ import annotations

import random
import re
import types
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from paceline.core.errors import ConfigError
from paceline.torch_internals import ATTENTION_FORWARDS, TorchDispatchMode, buffer_table

# --- Selection of wrap units ---


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


def wrap_units(module: nn.Module, wrap: str, option: str = "--fsdp-wrap") -> list[nn.Module]:
    """Return the modules below ``module`` that are wrap units, inner ones first.

    Args:
        wrap: "whole", comma-separated class names, or a number of parameters such as 1M: the smallest modules with at
            least that many. "auto": the same for 1M, where a block counts as one module.
        option: the option that set ``wrap``, for messages.

    Raises:
        ConfigError: ``wrap`` has another form, or names a class that the model does not contain.
    """
    if wrap == "whole":
        return []
    if wrap == "auto":
        return _by_size(module, 10**6, model_blocks(module))
    size = re.fullmatch(r"(\d+)([KMG]?)", wrap)
    if size:
        return _by_size(module, int(size[1]) * _UNITS[size[2]])
    names = [name.strip() for name in wrap.split(",")]
    classes = {type(child).__name__ for child in module.modules()}
    missing = [name for name in names if name not in classes]
    if missing:
        raise ConfigError(
            f"{option} {wrap}: the model has no module of class {missing[0]}. It has: "
            f"{', '.join(sorted(classes))}. Give a class, a number of parameters such as 1M, or whole."
        )
    units = [child for child in module.modules() if type(child).__name__ in names and child is not module]
    return list(reversed(units))


def repeated_units(module: nn.Module) -> list[nn.Module]:
    """Return the composite members of the model's lists, such as a transformer's blocks.

    Nested lists are searched, the inside of a block is not.
    """
    units: list[nn.Module] = []
    for child in module.children():
        nested = repeated_units(child)
        is_composite = any(True for _ in child.children()) and any(True for _ in child.parameters())
        is_listed = isinstance(module, _LISTS) and is_composite and not isinstance(child, _NEVER_CALLED)
        if is_listed and not (isinstance(child, _LISTS) and nested):
            units.append(child)
        else:
            units += nested
    return units


def model_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the model's blocks: of the classes that it names in ``_no_split_modules``, else its repeated units.

    fsdp, activation checkpointing, ``--compile``, pipelines and ``plan`` use the same.
    """
    named = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    units = repeated_units(module)
    # A class that fsdp has derived from the model's has another name.
    return [unit for unit in units if named & {kind.__name__ for kind in type(unit).__mro__}] or units


def exclude_tied(module: nn.Module, units: Iterable[nn.Module]) -> list[nn.Module]:
    """Drop modules that share a parameter with modules outside of them.

    A parameter shared by two modules that are sharded separately would become two. A dropped module is gathered with
    the smallest enclosing unit that contains all its parameters.

    Args:
        units: modules below it, inner ones first.
    """
    total_uses = _count_uses(module)
    times = Counter(id(child) for _, child in module.named_modules(remove_duplicate=False))
    kept: list[nn.Module] = []
    taken: set[int] = set()
    for child in units:
        own = {key: number for key, number in _count_uses(child).items() if key not in taken}
        if all(times[id(child)] * number == total_uses[key] for key, number in own.items()):
            kept.append(child)
            taken |= own.keys()
    return kept


def _count_uses(module: nn.Module) -> Counter[int]:
    """Count the occurrences of each parameter, by its identity, in the tree of modules."""
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))


def _by_size(module: nn.Module, least: int, blocks: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """Return the smallest modules with at least ``least`` parameters outside of inner units, and none in a block."""
    units: list[nn.Module] = []
    undivided = {id(block) for block in blocks}

    def visit(parent: nn.Module, is_root: bool) -> int:
        is_divided = id(parent) not in undivided
        remaining = sum(parameter.numel() for parameter in parent.parameters(recurse=not is_divided))
        remaining += sum(visit(child, False) for child in parent.children()) if is_divided else 0
        # Containers without a forward are never called.
        if is_root or remaining < least or isinstance(parent, _NEVER_CALLED):
            return remaining
        units.append(parent)
        return 0

    visit(module, True)
    return units


# --- Activation checkpointing ---
#
# Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, by ``torch.utils.checkpoint``. The recomputation
# is bitwise equal: it restores randomness and buffers, and leaves the buffers as the first forward did (batch norm
# would count a batch twice). Units are not wrapped, so parameters keep their names.


_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_aten = torch.ops.aten
_KEPT = frozenset(
    {
        *(_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default),
        *(_aten.convolution.default, _aten.mkldnn_convolution.default),
        *(attention.default for attention in ATTENTION_FORWARDS),
    }
)
"""The operations whose results selective checkpointing keeps, because they are the most expensive."""


def checkpoint_activations(
    module: nn.Module, what: Literal["block", "selective"], wrap: str, *, to_the_end: bool = False
) -> None:
    """Make units of a model recompute their activations in backward.

    Args:
        what: the recomputed operations. "block": everything inside a unit; "selective": all but :data:`_KEPT`.
        wrap: the units, as in ``--checkpoint-blocks``.
        to_the_end: recompute units completely, for hooks that come in pairs; else stop once backward has what it needs.

    Raises:
        ConfigError: the model has no such units.
    """
    units = model_blocks(module) if wrap == "auto" else wrap_units(module, wrap, "--checkpoint-blocks")
    if not units:
        classes = sorted({type(child).__name__ for child in module.modules() if child is not module})
        raise ConfigError(
            f"--checkpoint-activations {what} finds no block in the model"
            + (", which has no list of composed modules" if wrap == "auto" else "")
            + f". Give --checkpoint-blocks with some of {', '.join(classes)}, or a number of parameters."
        )
    for unit in units:
        # A bound method, so that a deep copy of the model uses its own parameters.
        forward = CheckpointedForward(selective=what == "selective", early_stop=not to_the_end)
        unit.__dict__["forward"] = types.MethodType(forward, unit)


@dataclass(frozen=True)
class CheckpointedForward:
    """A unit's forward with recomputation."""

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
        first = _RecordedState(block)
        recompute = _RestoredState(first)
        if not self.selective:
            return first, recompute
        keep, reuse = create_selective_checkpoint_contexts(list(_KEPT))  # type: ignore[no-untyped-call]
        return _CombinedContext(first, _OfKept(keep)), _CombinedContext(recompute, _OfKept(reuse))


class _OfKept(TorchDispatchMode):
    """Passes the kept operations to one of torch's modes, which requires forward and backward to run the same ones.

    Others differ: fsdp gathers a unit inside a block once more, and a split layer's cast is cached in forward.
    """

    def __init__(self, mode: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation in _KEPT:
            return self._mode.__torch_dispatch__(operation, types, args, kwargs)
        return operation(*args, **(kwargs or {}))


class _RecordedState:
    """Records a unit's buffers and the random states of Python and NumPy before its forward.

    ``checkpoint`` itself records torch's. All buffers are copied, because batch norm changes its statistics without
    raising their version.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self.buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
        self.random: tuple[Any, ...] = ()

    def __enter__(self) -> Self:
        self.buffers = [
            (owner, name, buffer.clone())
            for owner in self._block.modules()
            for name, buffer in buffer_table(owner).items()
            if buffer is not None
        ]
        self.random = _random_state()
        return self

    def __exit__(self, *error: object) -> None:
        pass


class _RestoredState:
    """Restores the :class:`_RecordedState` for the recomputation, and undoes that afterwards."""

    def __init__(self, first: _RecordedState) -> None:
        self._first = first

    def __enter__(self) -> Self:
        self._random = _random_state()
        self._buffers = [(owner, name, buffer_table(owner)[name]) for owner, name, _ in self._first.buffers]
        _set_random_state(self._first.random)
        for owner, name, before in self._first.buffers:
            buffer_table(owner)[name] = before.clone()
        return self

    def __exit__(self, *error: object) -> None:
        for owner, name, buffer in self._buffers:
            buffer_table(owner)[name] = buffer
        _set_random_state(self._random)


class _CombinedContext:
    """Several contexts as one."""

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
