"""The split of blocks into stages: by measured time and memory, equal, or manual."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.core.task import Loss
from paceline.parallel.options import Split
from paceline.parallel.pipeline.stages import Blocks, Values, replace_forward
from paceline.torch_internals import tree_leaves, tree_map_only

Trial = Callable[[nn.Module], Loss]
"""The task's loss on a micro-batch of the training data; it calls the model once."""

_REPEATS = range(4, 20)  # minimum and maximum; repeated until _MEASURE_S has passed
_MEASURE_S = 1.0
STATES = 4
"""Bytes of training state per byte of a parameter: itself, its gradient, and Adam's two moments."""


@dataclass(frozen=True)
class BlockCost:
    """The cost of a block for one micro-batch.

    Attributes:
        forward_s: seconds of its forward.
        backward_s: seconds of its backward.
        activation_bytes: saved for its backward, besides the parameters.
    """

    forward_s: float
    backward_s: float
    parameter_bytes: int
    activation_bytes: int

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


def measure(blocks: Blocks, module: nn.Module, device: torch.device, trial: Trial) -> list[BlockCost]:
    """Time each block's forward and backward on a real micro-batch, on this rank.

    Parameters, buffers, gradients and torch's random state are restored afterwards.

    Args:
        device: the device of training, to which each block is moved only while it is measured.
        trial: calls the model.
    """
    costs: list[list[BlockCost]] = []
    held = _owners(blocks, module)
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]

    output: Any = None
    returned_at = 0.0

    def forward(*args: Any, **kwargs: Any) -> Any:
        costs.append([])
        values = blocks.bind(*args, **kwargs)
        for number in range(len(blocks.blocks)):
            costs[-1].append(_measure_block(blocks, number, held[number], values, device))
        nonlocal output, returned_at
        output = tree_map_only(torch.Tensor, _leaf, blocks.result(values))
        returned_at = time.perf_counter()
        return output

    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), replace_forward(module, forward):
        started = time.perf_counter()
        while len(costs) < _REPEATS.start or (
            len(costs) < _REPEATS.stop and time.perf_counter() - started < _MEASURE_S
        ):
            loss = trial(module)
            _synchronize(device)
            costs[-1][-1] = _with_loss(costs[-1][-1], time.perf_counter() - returned_at, loss, device)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return [
        BlockCost(
            min(c.forward_s for c in of_block),
            min(c.backward_s for c in of_block),
            of_block[0].parameter_bytes,
            of_block[0].activation_bytes,
        )
        for of_block in zip(*costs[1:], strict=True)  # the first repetition warms up
    ]


def _with_loss(cost: BlockCost, forward_s: float, loss: Loss, device: torch.device) -> BlockCost:
    """Add the loss's cost to the last block's."""
    began = time.perf_counter()
    if loss.sum.requires_grad:
        loss.sum.backward()  # type: ignore[no-untyped-call]
    _synchronize(device)
    backward_s = time.perf_counter() - began
    return replace(cost, forward_s=cost.forward_s + forward_s, backward_s=cost.backward_s + backward_s)


def _owners(blocks: Blocks, module: nn.Module) -> list[list[torch.Tensor]]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return [[tensors[name] for name in sorted(block.holds)] for block in blocks.blocks]


def _measure_block(
    blocks: Blocks, number: int, tensors: Sequence[torch.Tensor], values: Values, device: torch.device
) -> BlockCost:
    block = blocks.blocks[number]
    original_data = [tensor.data for tensor in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.to(device)
    # Separate leaves, so that backward ends at the block's inputs.
    computed = {name for earlier in blocks.blocks[:number] for name in earlier.gives}
    for name in block.needs & computed:
        values[name] = tree_map_only(torch.Tensor, _leaf, values[name])
    parameters = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    _synchronize(device)
    began = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        block.run(values)
    _synchronize(device)
    forward_s = time.perf_counter() - began
    after = blocks.crossing(number + 1)
    outputs = [
        leaf
        for name in block.gives
        if name in after or name in blocks.result_needs
        for leaf in tree_leaves(values[name])
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    backward_s = 0.0
    if outputs:
        ones = [torch.ones_like(output) for output in outputs]
        began = time.perf_counter()
        torch.autograd.backward(outputs, ones)
        _synchronize(device)
        backward_s = time.perf_counter() - began
    for tensor, original in zip(tensors, original_data, strict=True):
        tensor.grad = None
        tensor.data = original
    for name in block.gives:
        values[name] = tree_map_only(torch.Tensor, torch.Tensor.detach, values[name])
    nbytes = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, nn.Parameter))
    return BlockCost(forward_s, backward_s, nbytes, sum(saved.values()))


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def manual_split(blocks: Blocks, stages: int, how: Split) -> tuple[int, ...]:
    """Return the number of blocks of each stage, for ``--pp-split equal`` or ``N,N,...``.

    Raises:
        ConfigError: the numbers do not fit the stages and blocks; suggests some that do.
    """
    number = len(blocks.blocks)
    equal = equal_split(number, stages)
    if isinstance(how, str):
        return equal
    if len(how) == stages and sum(how) == number and min(how) > 0:
        return how
    raise ConfigError(
        f"--pp-split {','.join(map(str, how))} does not fit this model, whose {number} blocks are split into {stages} "
        f"stages. Give {stages} numbers that add up to {number}, such as {','.join(map(str, equal))}, or balanced."
    )


def require_blocks(blocks: Blocks, stages: int) -> None:
    """Reject more stages than blocks.

    Raises:
        ConfigError: gives the maximum number of stages, and the reasons that keep blocks together.
    """
    number = len(blocks.blocks)
    if number >= stages:
        return
    reason = (
        f" Blocks that share a parameter cannot be separated: {'; '.join(blocks.shared[:3])}." if blocks.shared else ""
    )
    if blocks.closed:
        reason += f" Layers that tp splits as a pair cannot be separated: {'; '.join(blocks.closed[:3])}."
    advice = (
        f"Use {number} stages at most, or a model with more blocks." if number > 1 else "Use --strategy ddp or fsdp."
    )
    raise ConfigError(f"the model has {number} block(s), too few for {stages} stages.{reason} {advice}")


def equal_split(blocks: int, stages: int) -> tuple[int, ...]:
    """Return numbers of blocks that differ by at most one."""
    bounds = [stage * blocks // stages for stage in range(stages + 1)]
    return tuple(stop - start for start, stop in itertools.pairwise(bounds))


def balanced_split(
    costs: Sequence[BlockCost],
    stages: int,
    *,
    in_flight: Sequence[int] = (),
    limit_bytes: float = math.inf,
) -> tuple[int, ...]:
    """Return the split whose slowest stage is fastest, among those whose stages fit into memory.

    By dynamic programming over (stages, blocks): O(stages * blocks^2). Ties go to the smaller sum of squared times, so
    that the other stages are even too.

    Args:
        in_flight: for each stage, the number of micro-batches whose activations it holds; by default one.
        limit_bytes: memory of a stage: :data:`STATES` times its parameters, and its activations.

    Raises:
        ConfigError: no split fits; gives the memory that the best one needs.
    """
    number = len(costs)
    in_flight_of = list(in_flight) or [1] * stages
    times = [0.0, *itertools.accumulate(cost.seconds for cost in costs)]
    states = [0, *itertools.accumulate(STATES * cost.parameter_bytes for cost in costs)]
    activations = [0, *itertools.accumulate(cost.activation_bytes for cost in costs)]
    Best = tuple[float, float, float, tuple[int, ...]]  # memory too much, slowest, squares, sizes

    def add(best: Best, stage: int, start: int, stop: int) -> Best:
        seconds = times[stop] - times[start]
        needed = states[stop] - states[start] + in_flight_of[stage] * (activations[stop] - activations[start])
        too_much = max(best[0], needed - limit_bytes, 0.0)
        return (too_much, max(best[1], seconds), best[2] + seconds**2, (*best[3], stop - start))

    row: dict[int, Best] = {0: (0.0, 0.0, 0.0, ())}
    for stage in range(stages):
        following: dict[int, Best] = {}
        for stop in range(stage + 1, number - (stages - stage - 1) + 1):
            following[stop] = min(
                (add(best, stage, start, stop) for start, best in row.items() if start < stop),
                key=lambda best: best[:3],
            )
        row = following
    too_much, _, _, sizes = row[number]
    if too_much > 0:
        raise ConfigError(
            f"no split of the model into {stages} stages fits: the largest stage needs "
            f"{(limit_bytes + too_much) / 2**30:.1f} GiB of {limit_bytes / 2**30:.1f} GiB. Use more stages, "
            "smaller micro-batches (more --microbatches), or --pp-split with numbers of your own."
        )
    return sizes
