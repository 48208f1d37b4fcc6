"""How a model's layers are split over ranks: as its task says, or as is found."""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from paceline.errors import ConfigError, TaskError
from paceline.strategies.tensor_pairs import Pair, pairs

Plan = Mapping[str, ParallelStyle]


def found_plan(module: nn.Module, degree: int) -> dict[str, ParallelStyle]:
    """How the layers of a model can be split: pairs of layers, embeddings, and linear layers by themselves.

    Raises:
        ConfigError: a pair cannot be shared equally, or there is nothing to split.
    """
    plan: dict[str, ParallelStyle] = {}
    found = pairs(module)
    for pair in found:
        _require_divisible(pair, found, degree)
        plan |= {name: ColwiseParallel() for name in pair.columns}
        plan |= {name: RowwiseParallel() for name in pair.rows}
    for name, layer in module.named_modules():
        style = None if name in plan or not name else _alone(layer, degree)
        if style is not None:
            plan[name] = style
    for owners in tied(module).values():
        # What two layers share has to be split in one way.
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


def described(module: nn.Module, plan: Plan, degree: int) -> str:
    """What is split, and how, in a line; numbered blocks are named once."""
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


def _require_divisible(pair: Pair, found: Sequence[Pair], degree: int) -> None:
    if pair.units % degree == 0:
        return
    common = math.gcd(*(one.units for one in found))
    fitting = [number for number in range(1, common + 1) if common % number == 0]
    nearest = min(fitting, key=lambda number: (abs(number - degree), -number))
    unit = "heads" if pair.heads else "features"
    raise ConfigError(
        f"--strategy tp: {degree} processes cannot share the {pair.units} {unit} of {pair.columns[0]!r} "
        f"equally. The nearest number that can share all layers: {nearest}."
    )


def _alone(layer: nn.Module, degree: int) -> ParallelStyle | None:
    """How to split a layer whose input and output stay whole."""
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
    """The dimension of the layer's weight that a found style splits."""
    if style is None:
        return None
    return int(isinstance(style, ColwiseParallel) == isinstance(layer, nn.Embedding))


def named_plan(given: Plan, module: nn.Module, where: str) -> dict[str, ParallelStyle]:
    """A task's plan with its patterns written out.

    Args:
        given: names or patterns, and styles.
        module: the model.
        where: what gave the plan, for messages.

    Raises:
        TaskError: a name fits no module.
    """
    names = [name for name, _ in module.named_modules() if name]
    plan: dict[str, ParallelStyle] = {}
    for pattern, style in given.items():
        matching = fnmatch.filter(names, pattern)
        if not matching:
            close = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            nearest = f" The nearest: {close[0]}." if close else ""
            raise TaskError(f"{where} names {pattern!r}, and the model has no such module.{nearest}")
        plan |= dict.fromkeys(matching, style)
    return plan


def require_whole_heads(module: nn.Module, plan: Plan, degree: int) -> None:
    """Refuse a task's plan under which a rank would hold a part of a head.

    Raises:
        ConfigError: names the nearest number of ranks that can share the heads.
    """
    found = [pair for pair in pairs(module) if pair.heads and plan.keys() & set(pair.columns)]
    for pair in found:
        _require_divisible(pair, found, degree)


def tied(module: nn.Module) -> dict[int, list[tuple[str, str]]]:
    """The parameters that several modules share: for each, the modules' names and what they call it."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for name, owner in module.named_modules():
        for own, parameter in owner.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((name, own))
    return {key: places for key, places in owners.items() if len(places) > 1}


def require_equal_parts(module: nn.Module, degree: int) -> None:
    """Refuse a plan under which ranks would hold parts of different sizes.

    Raises:
        ConfigError: names the nearest number of ranks that can share the layer.
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
    """Whether ranks hold different parts along a dimension."""
    return isinstance(placement, Shard)
