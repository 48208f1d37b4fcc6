"""Parts of the optimizer: averages, loss scaling, learning rates of parameters."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer, SparseAdam
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paceline.parallel.sharded_state import ShardedOptimizer, is_distributed, local_shard
from paceline.torch_internals import PartsGradScaler, foreach_copy_

# --- The moving average of the weights ---


class EMA(AveragedModel):
    """torch's exponential moving average, of parameters that may be distributed: each rank averages its part.

    Floating-point buffers are averaged too (batch norm's statistics). Buffers without a mean are copied: integers
    (position ids, counters) and masks with infinities. A parametrization derives its own buffers (spectral norm's
    singular vectors) from the averaged weight.

    Args:
        module: a second model, laid out as the first and equal to it, that becomes the average.
        decay: of the average.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        # AveragedModel would copy the model, which a sharded one does not allow.
        super().__init__(nn.Module(), multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)  # type: ignore[no-untyped-call]
        self.module = module
        self._parametrizations = [
            child
            for child in module.modules()
            if isinstance(child, ParametrizationList) and any(True for _ in child.buffers())
        ]
        derived = {id(buffer) for child in self._parametrizations for buffer in child.buffers()}
        self._updates: list[Literal["average", "copy", "derive"]] = []
        self._updates += ["average"] * sum(1 for _ in module.parameters())
        for buffer in module.buffers():
            has_mean = buffer.is_floating_point() or buffer.is_complex()
            has_mean = has_mean and bool(local_shard(buffer).isfinite().all())
            if id(buffer) in derived:
                self._updates.append("derive")
            else:
                self._updates.append("average" if has_mean else "copy")

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Move the average towards the model."""
        pairs = zip(_state_parts(self.module), _state_parts(model), self._updates, strict=True)
        groups: dict[tuple[torch.dtype, torch.device, str], list[tuple[torch.Tensor, torch.Tensor]]]
        groups = defaultdict(list)
        for average, value, update in pairs:
            groups[average.dtype, average.device, "copy" if self.n_averaged == 0 else update].append((average, value))
        for (_, _, kind), group in groups.items():
            averages, values = ([pair[side] for pair in group] for side in (0, 1))
            if kind == "copy":
                foreach_copy_(averages, values)
            elif kind == "average":
                assert self.multi_avg_fn is not None
                self.multi_avg_fn(averages, values, self.n_averaged)
        self._derive_buffers()
        self.n_averaged += 1

    def _derive_buffers(self) -> None:
        """Have parametrizations renew their buffers from the averaged weights."""
        for parametrizations in self._parametrizations:
            originals = (
                [parametrizations.original]
                if hasattr(parametrizations, "original")
                else [getattr(parametrizations, f"original{index}") for index in range(parametrizations.ntensors)]
            )
            value = [_full(original) for original in originals]
            for parametrization in parametrizations:
                is_training = parametrization.training
                value = [parametrization.train()(*value)]
                parametrization.train(is_training)


def _full(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if is_distributed(tensor) else tensor
    return whole


def _state_parts(module: nn.Module) -> list[torch.Tensor]:
    tensors = itertools.chain(module.parameters(), module.buffers())
    return [local_shard(tensor.detach()) for tensor in tensors]


# --- A gradient scaler for parameters of which each rank may hold a part ---


LEAST_SCALE = 2.0**-14
"""The smallest normal number of a half: gradients that it does not bring into range are not finite at all."""


class ShardedGradScaler(PartsGradScaler):
    """Unscales what this rank holds of each gradient, and skips a step for all optimizers or for none.

    torch's takes no plain parameters together with distributed ones, and decides for each optimizer: a step that
    only one of them applied would be neither a step nor a skipped one. The gradients of other ranks
    it does not see: whether all of it is finite, the ranks agree on before.
    """

    def unscale_all(self, optimizers: Collection[Optimizer], *, finite: bool) -> bool:
        """Unscale the gradients of a step.

        Args:
            optimizers: of all parameters.
            finite: whether the gradients of all ranks are.

        Returns:
            Whether the optimizers apply it: none does if a gradient is not finite.
        """
        for optimizer in optimizers:
            self.unscale_(optimizer)
        found = [inf for optimizer in optimizers for inf in self.found_infs(optimizer)]
        finite = finite and not torch.stack([inf.to(found[0].device) for inf in found]).any().item()
        if not finite:
            for inf in found:
                inf.fill_(1.0)
        self._applies = finite
        return finite

    def step(self, optimizer: Optimizer, *arguments: Any, **options: Any) -> float | None:
        """Step an optimizer if :meth:`unscale_all` has said so; torch's would ask the GPU for each."""
        return optimizer.step(*arguments, **options) if self._applies else None

    def parts(self, optimizer: Optimizer) -> list[torch.Tensor]:
        parts = []
        if isinstance(optimizer, ShardedOptimizer):
            for gradient in optimizer.gradients():
                part = gradient.detach()
                part.grad = gradient
                parts.append(part)
            return parts
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    part = local_shard(parameter.detach())
                    part.grad = local_shard(parameter.grad)
                    parts.append(part)
        return parts


# --- Learning rates that differ within a model ---


LR_FACTOR = "paceline_lr_scale"
"""The key of a parameter group's factor; its ``lr`` stays what the task and its schedulers make of it."""


def current_lr(group: Mapping[str, Any]) -> Any:
    """Return the learning rate of a group's parameters."""
    return group["lr"] * group.get(LR_FACTOR, 1.0)


@contextmanager
def scaled_lr(optimizers: Mapping[str, Optimizer]) -> Iterator[None]:
    """Within, each group's ``lr`` is what updates its parameters; afterwards it is as before."""
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
    groups = [group for group in groups if group.get(LR_FACTOR, 1.0) != 1.0]
    before = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = current_lr(group)
    try:
        yield
    finally:
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr


@contextmanager
def sparse_gradients(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Within, parameters of ``SparseAdam`` have sparse gradients of their non-zero rows; afterwards dense ones again.

    The ranks sum dense gradients, but that optimizer takes none.
    """
    parameters = [
        parameter
        for optimizer in optimizers
        if isinstance(optimizer, SparseAdam)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None and not parameter.grad.is_sparse
    ]
    dense = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = parameter.grad.to_sparse(1)
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, dense, strict=True):
            parameter.grad = gradient
