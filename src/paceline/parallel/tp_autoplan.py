"""The automatic plan of tensor parallelism: the layers of a model that can be split."""

from __future__ import annotations

import copy
import difflib
import fnmatch
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional

from paceline.core.errors import ConfigError, TaskError

# --- Pairs of layers, found by the data flow between them ---
#
# A linear layer is split by columns and the next one by rows if everything in between treats each feature, or each
# head, separately: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
# Parallelism", 2019. The data flow is that of ``torch.fx``'s symbolic trace.


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
    """Layers that are split together: the outputs of the first are the inputs of the last.

    Attributes:
        columns: linear layers of which each rank holds some output features.
        rows: linear layers of which each rank holds the weights of those features.
        units: number of units to divide equally: features, or heads.
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
        sources: the layers that computed it.
        ndim: its number of dimensions, where known.
        width: features per unit: 1, or those of a head.
    """

    sources: frozenset[str]
    dim: int = -1
    ndim: int | None = None
    width: int = 1


def pairs(module: nn.Module) -> list[Pair]:
    """Return the layers of ``module`` that can be split together, in the model's order.

    Parts that ``torch.fx`` cannot trace are searched child by child.
    """
    return [*_pairs(_shadow(module), "")]


def _shadow(module: nn.Module) -> nn.Module:
    """Copy a module to the meta device, because a trace runs the model's code, which may change buffers."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def _pairs(module: nn.Module, prefix: str) -> list[Pair]:
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        # Their code branches on computed values, so it cannot be traced.
        both = tuple(f"{prefix}{name}" for name in ("linear1", "linear2"))
        return [Pair(both[:1], both[1:], module.linear1.out_features)]
    if not any(isinstance(child, nn.Linear) for child in module.modules()):
        return []
    try:
        graph = fx.Tracer().trace(module)
    except Exception:  # the model's code may raise anything under a trace
        return [
            pair
            for name, child in module.named_children()
            if type(child) is not nn.Linear
            for pair in _pairs(child, f"{prefix}{name}.")
        ]
    found_pairs = [
        replace(
            pair,
            columns=tuple(prefix + name for name in pair.columns),
            rows=tuple(prefix + name for name in pair.rows),
        )
        for pair in _Flow(module, graph).pairs()
    ]
    for node in graph.nodes:
        # Modules that the trace treated as leaves.
        if node.op == "call_module":
            child = module.get_submodule(node.target)
            if not isinstance(child, nn.Linear):
                found_pairs += _pairs(child, f"{prefix}{node.target}.")
    return found_pairs


class _Flow:
    """Follows split values to their uses, and excludes layers with unsupported uses."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        self._graph = graph
        self._modules = {
            node.target: module.get_submodule(node.target) for node in graph.nodes if node.op == "call_module"
        }
        calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
        self._linears = {
            name: layer for name, layer in self._modules.items() if type(layer) is nn.Linear and calls[name] == 1
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
                return self._group_pairs()

    def _group_pairs(self) -> list[Pair]:
        groups: dict[frozenset[str], list[str]] = {}
        for name, split in self._rows.items():
            groups.setdefault(split.sources, []).append(name)
        found_pairs = []
        for sources, rows in groups.items():
            columns = tuple(name for name in self._linears if name in sources)
            width = self._rows[rows[0]].width
            features = min(self._linears[name].out_features for name in columns)
            found_pairs.append(Pair(columns, tuple(rows), features // width, heads=width > 1))
        return found_pairs

    def _follow(self) -> None:
        self._rows = {}
        self._values = {}
        for node in self._graph.nodes:
            split = self._propagate(node)
            if split is not None:
                self._values[node] = split
        # A layer in two groups would need two different splits.
        for split in self._rows.values():
            for other in self._rows.values():
                if split.sources != other.sources and split.sources & other.sources:
                    self._unfit |= split.sources | other.sources

    def _propagate(self, node: fx.Node) -> _Split | None:
        inputs = [self._values[value] for value in node.all_input_nodes if value in self._values]
        layer = self._modules.get(node.target) if node.op == "call_module" else None
        if not inputs:
            if layer is not None and node.target in self._linears and node.target not in self._unfit:
                return _Split(frozenset({str(node.target)}))
            return None
        split = self._merge_inputs(inputs)
        after = None if split is None else self._split_after(node, layer, split)
        if after is None and not (split is not None and self._ends(node, split)):
            for one in inputs:
                self._unfit |= one.sources
        return after

    def _ends(self, node: fx.Node, split: _Split) -> bool:
        """Return whether this is a linear layer that consumes the split value, by rows."""
        if node.op != "call_module" or node.target not in self._linears or split.dim != -1:
            return False
        self._rows[str(node.target)] = split
        return True

    def _merge_inputs(self, inputs: Sequence[_Split]) -> _Split | None:
        first = inputs[0]
        sources = frozenset().union(*(split.sources for split in inputs))
        known = {split.ndim for split in inputs if split.ndim is not None}
        is_consistent = len({(split.dim, split.width) for split in inputs}) == 1 and len(known) < 2
        return replace(first, sources=sources, ndim=max(known, default=None)) if is_consistent else None

    def _split_after(self, node: fx.Node, layer: nn.Module | None, split: _Split) -> _Split | None:
        """Return the split of a node's output; None if unknown."""
        if layer is not None:
            return split if isinstance(layer, _ELEMENTWISE_MODULES) else None
        if node.op not in ("call_function", "call_method"):
            return None
        if node.target in _ELEMENTWISE:
            # All tensor operands must be split.
            return split if all(value in self._values for value in node.all_input_nodes) else None
        if node.target is functional.scaled_dot_product_attention:
            first_three = list(node.args[:3])
            return split if len(first_three) == 3 and _all_in(first_three, self._values) and split.dim < -2 else None
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        move = _MOVES.get(name)
        return None if move is None else move(node, split)


def _all_in(values: Sequence[Any], known: Mapping[fx.Node, _Split]) -> bool:
    return all(value in known for value in values)


def _arguments(node: fx.Node, names: Sequence[str]) -> list[Any]:
    """Return the arguments after the tensor, positional or by name."""
    return [*node.args[1:], *(node.kwargs[name] for name in names if name in node.kwargs)]


def _unflatten(node: fx.Node, split: _Split) -> _Split | None:
    dim, sizes = _arguments(node, ("dim", "sizes"))
    ndim = split.ndim if dim < 0 else dim + 1
    if split.dim != -1 or split.width != 1 or split.ndim not in (None, ndim) or dim not in (-1, (ndim or 0) - 1):
        return None
    return _in_heads(split, tuple(sizes), None if ndim is None else ndim + 1)


def _view(node: fx.Node, split: _Split) -> _Split | None:
    sizes = _arguments(node, ())
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
        sizes = list(sizes[0])
    if split.dim == -1 and split.width == 1:
        return _in_heads(split, tuple(sizes[-2:]), len(sizes))
    # The heads and their features are merged into features.
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


# --- Plans: from the task, or inferred ---


Plan = Mapping[str, ParallelStyle]


def infer_tp_plan(module: nn.Module, degree: int) -> dict[str, ParallelStyle]:
    """Infer a plan for a model: pairs of layers, its own or found ones, embeddings, and single linear layers.

    Raises:
        ConfigError: a pair cannot be divided equally, or there is nothing to split.
    """
    plan, found_pairs = _plan_of_model(module)
    found_pairs = found_pairs or pairs(module)
    for pair in found_pairs:
        _require_divisible(pair, found_pairs, degree)
        plan |= {name: ColwiseParallel() for name in pair.columns}
        plan |= {name: RowwiseParallel() for name in pair.rows}
    for name, layer in module.named_modules():
        style = None if name in plan or not name else _single_layer_style(layer, degree)
        if style is not None:
            plan[name] = style
    for owners in find_tied_parameters(module).values():
        # Parameters shared by layers must be split in one way.
        ways = {_split_dim(module.get_submodule(name), plan.get(name)) for name, _ in owners}
        if len(ways) > 1:
            for name, _ in owners:
                plan.pop(name, None)
    if not plan:
        raise ConfigError(
            f"--strategy tp: the model has no linear layer and no embedding that {degree} processes can "
            "share. Use --strategy ddp, or fsdp."
        )
    return plan


_COLUMNS, _ROWS, _ROWS_OF_WHOLE = "colwise", "rowwise", "rowwise_split_input"


def _plan_of_model(module: nn.Module) -> tuple[dict[str, ParallelStyle], list[Pair]]:
    """Return the plan that a model of ``transformers`` has in ``_tp_plan``: single layers, and pairs by module.

    A module for which the plan has another style, or names other than linear layers, is left out as a whole.
    """
    patterns = dict(getattr(module, "_tp_plan", None) or {})
    layers = {name: layer for name, layer in module.named_modules() if type(layer) is nn.Linear}
    names = [name for name, _ in (*module.named_modules(), *module.named_parameters())]
    matching = {pattern: fnmatch.filter(names, pattern) for pattern in patterns}
    is_known = {
        pattern: patterns[pattern] in (_COLUMNS, _ROWS, _ROWS_OF_WHOLE) and layers.keys() >= set(matching[pattern])
        for pattern in patterns
        if "." in pattern and matching[pattern]
    }
    unknown = {pattern.rpartition(".")[0] for pattern, known in is_known.items() if not known}
    plan: dict[str, ParallelStyle] = {}
    found: list[Pair] = []
    for pattern in is_known:
        if pattern.rpartition(".")[0] in unknown:
            continue
        for name in matching[pattern]:
            if patterns[pattern] == _COLUMNS:
                width = getattr(module.get_submodule(name.rpartition(".")[0]), "head_dim", 1)
                found.append(Pair((name,), (), layers[name].out_features // width, heads=width > 1))
            else:
                is_whole = patterns[pattern] == _ROWS_OF_WHOLE
                plan[name] = RowwiseParallel(input_layouts=Replicate()) if is_whole else RowwiseParallel()
    return plan, found


def describe_tp_plan(module: nn.Module, plan: Plan, degree: int) -> str:
    """Describe a plan in one line; numbered blocks are named once."""
    parameters = [parameter for parameter in module.parameters() if not parameter.is_meta]  # of other stages
    split = sum(p.numel() for p in parameters if isinstance(p, DTensor) and any(map(is_shard, p.placements)))
    share = 100 * split / sum(p.numel() for p in parameters)
    ways: dict[str, dict[str, None]] = {}
    for name, style in plan.items():
        ways.setdefault(_way(style), {})[re.sub(r"\b\d+\b(?=\.)", "*", name)] = None
    listed = "; ".join(f"{way}: {', '.join(names)}" for way, names in sorted(ways.items()))
    return f"tensor parallel over {degree} processes, {share:.0f} % of the parameters are split. {listed}"


def _way(style: ParallelStyle) -> str:
    if isinstance(style, ColwiseParallel):
        return "by columns"
    if isinstance(style, RowwiseParallel):
        return "by rows"
    return "along the sequence" if isinstance(style, SequenceParallel) else type(style).__name__


def _require_divisible(pair: Pair, found_pairs: Sequence[Pair], degree: int) -> None:
    if pair.units % degree == 0:
        return
    common = math.gcd(*(one.units for one in found_pairs))
    fitting = [number for number in range(1, common + 1) if common % number == 0]
    nearest = min(fitting, key=lambda number: (abs(number - degree), -number))
    unit = "heads" if pair.heads else "features"
    raise ConfigError(
        f"--strategy tp: {degree} processes cannot share the {pair.units} {unit} of {pair.columns[0]!r} "
        f"equally. The nearest number that divides all layers: {nearest}."
    )


def _single_layer_style(layer: nn.Module, degree: int) -> ParallelStyle | None:
    """Return the split of a layer whose input and output stay full."""
    if type(layer) is nn.Linear:
        if layer.out_features % degree == 0:
            return ColwiseParallel(output_layouts=Replicate())
        return RowwiseParallel(input_layouts=Replicate()) if layer.in_features % degree == 0 else None
    if type(layer) is nn.Embedding and layer.max_norm is None and not layer.sparse:
        if layer.num_embeddings % degree == 0 and layer.padding_idx is None:
            return RowwiseParallel(input_layouts=Replicate())
        return ColwiseParallel(output_layouts=Replicate()) if layer.embedding_dim % degree == 0 else None
    return None


def _split_dim(layer: nn.Module, style: ParallelStyle | None) -> int | None:
    """Return the dimension of the layer's weight that an inferred style splits."""
    if style is None:
        return None
    return int(isinstance(style, ColwiseParallel) == isinstance(layer, nn.Embedding))


def tp_plan_from_task(given: Plan, module: nn.Module, where: str) -> dict[str, ParallelStyle]:
    """Expand the patterns of a task's plan.

    Args:
        given: names or patterns, and styles.
        where: the source of the plan, for messages.

    Raises:
        TaskError: a name matches no module.
    """
    names = [name for name, _ in module.named_modules() if name]
    plan: dict[str, ParallelStyle] = {}
    for pattern, style in given.items():
        matching = fnmatch.filter(names, pattern)
        if not matching:
            close = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            nearest = f" The nearest: {close[0]}." if close else ""
            raise TaskError(f"{where} names {pattern!r}, but the model has no such module.{nearest}")
        plan |= dict.fromkeys(matching, style)
    return plan


def require_whole_heads(module: nn.Module, plan: Plan, degree: int) -> None:
    """Reject a task's plan that would split a head.

    Raises:
        ConfigError: gives the nearest number of ranks that works.
    """
    found_pairs = [pair for pair in pairs(module) if pair.heads and plan.keys() & set(pair.columns)]
    for pair in found_pairs:
        _require_divisible(pair, found_pairs, degree)


def find_tied_parameters(module: nn.Module) -> dict[int, list[tuple[str, str]]]:
    """Return the parameters shared by several modules, each with the modules' names and its names in them."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for name, owner in module.named_modules():
        for own, parameter in owner.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((name, own))
    return {key: places for key, places in owners.items() if len(places) > 1}


def require_equal_parts(module: nn.Module, degree: int) -> None:
    """Reject a plan that gives ranks parts of different sizes.

    Raises:
        ConfigError: gives the nearest number of ranks that works.
    """
    for name, parameter in module.named_parameters():
        for placement in getattr(parameter, "placements", ()):
            if is_shard(placement) and parameter.shape[placement.dim] % degree:
                size = parameter.shape[placement.dim]
                fitting = [number for number in range(1, size + 1) if size % number == 0]
                nearest = min(fitting, key=lambda number: (abs(number - degree), -number))
                raise ConfigError(
                    f"--strategy tp: {degree} processes cannot share the {size} features of {name!r} "
                    f"equally. The nearest number that can: {nearest}."
                )


def is_shard(placement: Any) -> bool:
    """Return whether a placement shards along a dimension."""
    return isinstance(placement, Shard)
