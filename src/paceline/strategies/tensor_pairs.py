"""Which layers of a model tensor parallelism can split, found by how data flows between them.

A linear layer is split by columns, the next one by rows, where all that happens in between treats every
feature, or every head, by itself: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language
Models Using Model Parallelism", 2019. The way of the data is that of ``torch.fx``'s symbolic trace.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

_ELEMENTWISE_MODULES = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Mish, nn.Hardswish, nn.Softplus),
    *(nn.Tanh, nn.Sigmoid, nn.Dropout, nn.Identity),
)
_ELEMENTWISE: set[Any] = {
    *(torch.relu, torch.tanh, torch.sigmoid, torch.add, torch.sub, torch.mul, torch.div),
    *(functional.relu, functional.relu6, functional.gelu, functional.silu, functional.elu),
    *(functional.leaky_relu, functional.mish, functional.hardswish, functional.softplus),
    *(functional.tanh, functional.sigmoid, functional.dropout),
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow),
    *("relu", "tanh", "sigmoid", "add", "sub", "mul", "div", "square", "pow", "neg"),
    *("contiguous", "clone", "float", "type_as"),
}


@dataclass(frozen=True)
class Pair:
    """Layers that are split together: what the first ones compute, the last ones take in.

    Attributes:
        columns: linear layers of which each rank holds some output features.
        rows: linear layers of which each rank holds the weights of those features.
        units: what must be shared equally: features, or heads.
        heads: whether ``units`` counts heads.
    """

    columns: tuple[str, ...]
    rows: tuple[str, ...]
    units: int
    heads: bool = False


@dataclass(frozen=True)
class _Split:
    """A value that is split along a dimension, counted from the last (-1).

    Attributes:
        sources: the layers whose outputs it comes from.
        dim: which one is split.
        ndim: how many it has, where that is known.
        width: features in a unit: 1, or those of a head.
    """

    sources: frozenset[str]
    dim: int = -1
    ndim: int | None = None
    width: int = 1


def pairs(module: nn.Module) -> list[Pair]:
    """The layers of ``module`` that can be split together, in the model's order.

    What ``torch.fx`` cannot trace is looked at part by part.
    """
    return [*_pairs(_shadow(module), "")]


def _shadow(module: nn.Module) -> nn.Module:
    """A copy without content: a trace runs the model's code, which may change buffers."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def _pairs(module: nn.Module, prefix: str) -> list[Pair]:
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        # Their code branches on what is computed, and cannot be traced.
        both = tuple(f"{prefix}{name}" for name in ("linear1", "linear2"))
        return [Pair(both[:1], both[1:], module.linear1.out_features)]
    if not any(isinstance(child, nn.Linear) for child in module.modules()):
        return []
    try:
        graph = fx.Tracer().trace(module)
    except Exception:  # whatever the model's code does that a trace cannot follow
        return [
            pair
            for name, child in module.named_children()
            if type(child) is not nn.Linear
            for pair in _pairs(child, f"{prefix}{name}.")
        ]
    found = [
        replace(
            pair,
            columns=tuple(prefix + name for name in pair.columns),
            rows=tuple(prefix + name for name in pair.rows),
        )
        for pair in _Flow(module, graph).pairs()
    ]
    for node in graph.nodes:
        # What the trace did not look into.
        if node.op == "call_module":
            child = module.get_submodule(node.target)
            if not isinstance(child, nn.Linear):
                found += _pairs(child, f"{prefix}{node.target}.")
    return found


class _Flow:
    """Follows what layers compute to where it is used; gives up on those whose use it does not know."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        self._graph = graph
        self._modules = {
            node.target: module.get_submodule(node.target) for node in graph.nodes if node.op == "call_module"
        }
        calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
        self._linears = {
            name: layer
            for name, layer in self._modules.items()
            if type(layer) is nn.Linear and calls[name] == 1
        }
        self._unfit: set[str] = set()
        self._rows: dict[str, _Split] = {}
        self._values: dict[fx.Node, _Split] = {}

    def pairs(self) -> list[Pair]:
        while True:
            unfit = len(self._unfit)
            self._follow()
            used = {source for split in self._rows.values() for source in split.sources}
            self._unfit |= {source for split in self._values.values() for source in split.sources} - used
            if len(self._unfit) == unfit:
                return self._grouped()

    def _grouped(self) -> list[Pair]:
        groups: dict[frozenset[str], list[str]] = {}
        for name, split in self._rows.items():
            groups.setdefault(split.sources, []).append(name)
        found = []
        for sources, rows in groups.items():
            columns = tuple(name for name in self._linears if name in sources)
            width = self._rows[rows[0]].width
            features = min(self._linears[name].out_features for name in columns)
            found.append(Pair(columns, tuple(rows), features // width, heads=width > 1))
        return found

    def _follow(self) -> None:
        self._rows, self._values = {}, {}
        for node in self._graph.nodes:
            split = self._through(node)
            if split is not None:
                self._values[node] = split
        # A layer in two groups would have to be split in two ways.
        for split in self._rows.values():
            for other in self._rows.values():
                if split.sources != other.sources and split.sources & other.sources:
                    self._unfit |= split.sources | other.sources

    def _through(self, node: fx.Node) -> _Split | None:
        taken = [self._values[value] for value in node.all_input_nodes if value in self._values]
        layer = self._modules.get(node.target) if node.op == "call_module" else None
        if not taken:
            if layer is not None and node.target in self._linears and node.target not in self._unfit:
                return _Split(frozenset({str(node.target)}))
            return None
        split = self._merged(taken)
        after = None if split is None else self._after(node, layer, split)
        if after is None and not (split is not None and self._ends(node, split)):
            for one in taken:
                self._unfit |= one.sources
        return after

    def _ends(self, node: fx.Node, split: _Split) -> bool:
        """Whether this is the layer that takes in, split by rows, what others computed."""
        if node.op != "call_module" or node.target not in self._linears or split.dim != -1:
            return False
        self._rows[str(node.target)] = split
        return True

    def _merged(self, taken: Sequence[_Split]) -> _Split | None:
        first = taken[0]
        sources = frozenset().union(*(split.sources for split in taken))
        known = {split.ndim for split in taken if split.ndim is not None}
        alike = len({(split.dim, split.width) for split in taken}) == 1 and len(known) < 2
        return replace(first, sources=sources, ndim=max(known, default=None)) if alike else None

    def _after(self, node: fx.Node, layer: nn.Module | None, split: _Split) -> _Split | None:
        """What becomes of a split value; None where that is not known."""
        if layer is not None:
            return split if isinstance(layer, _ELEMENTWISE_MODULES) else None
        if node.op not in ("call_function", "call_method"):
            return None
        if node.target in _ELEMENTWISE:
            # Other tensors would have to be split too.
            return split if all(value in self._values for value in node.all_input_nodes) else None
        if node.target is functional.scaled_dot_product_attention:
            first_three = list(node.args[:3])
            return (
                split
                if len(first_three) == 3 and _all_in(first_three, self._values) and split.dim < -2
                else None
            )
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        move = _MOVES.get(name)
        return None if move is None else move(node, split)


def _all_in(values: Sequence[Any], known: Mapping[fx.Node, _Split]) -> bool:
    return all(value in known for value in values)


def _arguments(node: fx.Node, names: Sequence[str]) -> list[Any]:
    """What follows the tensor, by position or by name."""
    return [*node.args[1:], *(node.kwargs[name] for name in names if name in node.kwargs)]


def _unflatten(node: fx.Node, split: _Split) -> _Split | None:
    dim, sizes = _arguments(node, ("dim", "sizes"))
    ndim = split.ndim if dim < 0 else dim + 1
    if (
        split.dim != -1
        or split.width != 1
        or split.ndim not in (None, ndim)
        or dim not in (-1, (ndim or 0) - 1)
    ):
        return None
    return _in_heads(split, tuple(sizes), None if ndim is None else ndim + 1)


def _view(node: fx.Node, split: _Split) -> _Split | None:
    sizes = _arguments(node, ())
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
        sizes = list(sizes[0])
    if split.dim == -1 and split.width == 1:
        return _in_heads(split, tuple(sizes[-2:]), len(sizes))
    # Heads and their features become features again.
    if split.dim == -2 and sizes and sizes[-1] == -1 and split.ndim == len(sizes) + 1:
        return replace(split, dim=-1, ndim=len(sizes))
    return None


def _in_heads(split: _Split, sizes: tuple[Any, ...], ndim: int | None) -> _Split | None:
    if len(sizes) != 2 or sizes[0] != -1 or not isinstance(sizes[1], int):
        return None
    return replace(split, dim=-2, ndim=ndim, width=sizes[1])


def _transpose(node: fx.Node, split: _Split) -> _Split | None:
    dims = _arguments(node, ("dim0", "dim1"))
    if len(dims) != 2 or (split.ndim is None and max(dims) >= 0):
        return None
    one, other = (dim if dim < 0 else dim - (split.ndim or 0) for dim in dims)
    return replace(split, dim={one: other, other: one}.get(split.dim, split.dim))


def _flatten(node: fx.Node, split: _Split) -> _Split | None:
    start, *end = _arguments(node, ("start_dim", "end_dim"))
    if start >= 0:
        start -= split.ndim or 0
    if end not in ([], [-1]) or split.dim != -2 or start != -2:
        return None
    return replace(split, dim=-1, ndim=None if split.ndim is None else split.ndim - 1)


_MOVES: dict[str, Callable[[fx.Node, _Split], _Split | None]] = {
    "unflatten": _unflatten,
    "view": _view,
    "reshape": _view,
    "transpose": _transpose,
    "flatten": _flatten,
}
