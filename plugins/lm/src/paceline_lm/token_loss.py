"""The cross entropy of a language model in chunks: the logits of all tokens are never there at once.

The gradients of a chunk are computed with its loss, as in Hsu et al., "Liger Kernel", 2024: nothing is computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from paceline.core.errors import TaskError

IGNORED = -100
"""The label of what does not count."""

_LOGITS = 2**25
"""Logits of a chunk: 128 MiB in fp32."""


def has_chunks(head: nn.Linear, hidden: torch.Tensor) -> bool:
    """Return whether :func:`summed_loss` can be used, where the head is called.

    Tensor parallelism divides the head; and small gradients need the scale of fp16, which comes later.
    """
    is_divided = isinstance(head.weight, DTensor) or len(head.weight) != head.out_features  # or ``plan`` divides it
    return not is_divided and _compute_dtype(head, hidden) != torch.float16


def summed_loss(head: nn.Linear, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross entropies of all tokens, and how many of these the model predicts.

    Args:
        head: whose output are the logits.
        hidden: what the head gets, (..., H).
        targets: the next token at each place, or -100, (...).

    Returns:
        (1, 1, 2), float32. The second number is 0 where there is a gradient to compute.
    """
    parts: tuple[torch.Tensor | None, ...] = (hidden, head.weight, head.bias)
    wanted = tuple(torch.is_grad_enabled() and part is not None and part.requires_grad for part in parts)
    dtype = _compute_dtype(head, hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        sums: torch.Tensor = _ChunkedLoss.apply(*parts, targets, dtype, wanted)  # type: ignore[no-untyped-call]
    return sums


def loss_of_logits(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return what :func:`summed_loss` returns, of all logits, (..., V)."""
    flat, targets = logits.flatten(0, -2), targets.flatten()
    total = F.cross_entropy(flat.float(), targets, ignore_index=IGNORED, reduction="sum")
    return torch.stack([total, (flat.argmax(-1) == targets).sum().float()]).reshape(1, 1, 2)


def _compute_dtype(head: nn.Linear, hidden: torch.Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        dtype: torch.dtype,
        wanted: tuple[bool, bool, bool],
    ) -> torch.Tensor:
        flat, targets = hidden.flatten(0, -2), targets.flatten()
        gradients = [
            torch.empty_like(flat) if wanted[0] else None,
            torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None,
            torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wanted[2] else None,
        ]
        of_hidden, of_weight, of_bias = gradients
        matrix, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
        sums = torch.zeros(1, 1, 2, device=hidden.device)
        rows = max(1, _LOGITS // len(weight))
        for start in range(0, len(flat), rows):
            part, target = flat[start : start + rows].to(dtype), targets[start : start + rows]
            counts = target != IGNORED
            index = target.clamp(min=0)[:, None]
            logits = F.linear(part, matrix, shift).float()
            norms = logits.logsumexp(-1, keepdim=True)
            sums[0, 0, 0] += ((norms - logits.gather(-1, index))[:, 0] * counts).sum()
            if not any(wanted):
                sums[0, 0, 1] += ((logits.argmax(-1) == target) & counts).sum()
                continue
            # The probabilities, less 1 at the target.
            errors = logits.sub_(norms).exp_().scatter_add_(-1, index, -torch.ones_like(norms))
            errors = errors.mul_(counts[:, None]).to(dtype)
            if of_hidden is not None:
                of_hidden[start : start + rows] = errors @ matrix
            if of_weight is not None:
                if dtype == torch.float32:
                    of_weight.addmm_(errors.T, part)
                else:
                    of_weight += errors.T @ part
            if of_bias is not None:
                of_bias += errors.sum(0)
        # Rounded as the gradients of one product would be.
        ctx.gradients = [
            of_hidden if of_hidden is None else of_hidden.view_as(hidden),
            of_weight if of_weight is None else of_weight.to(dtype).to(weight.dtype),
            of_bias if of_bias is None or bias is None else of_bias.to(dtype).to(bias.dtype),
        ]
        return sums

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        scale = outputs[0][0, 0, 0]
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise TaskError(
                "backward() ran twice through one loss of a language model, whose gradients the first one has used up "
                "(the loss is computed in chunks): compute the loss again for the second one."
            )
        return *(of if of is None else of.mul_(scale) for of in gradients), None, None, None
