"""A backward in two halves: first the gradients of a stage's input, later those of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    stage_backward_input,
    stage_backward_weight,
)

from paceline.errors import TaskError

Groups = list[dict[str, Any]]
"""What the first half leaves for the second."""


def backward_of_inputs(
    roots: list[torch.Tensor],
    gradients: list[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[nn.Parameter],
    *,
    check: bool,
) -> Groups:
    """Give ``inputs`` their gradients.

    Args:
        roots: where backward begins; they are detached afterwards.
        gradients: of the roots.
        inputs: leaves.
        weights: those of the stage.
        check: that the second half will reach every weight that a whole backward would.

    Raises:
        TaskError: it would not.
    """
    there = set()
    if check:
        reached = construct_reverse_graph([_node(root) for root in roots])
        there = {_node(weight) for weight in weights} & reached.keys()
    _, groups = stage_backward_input(roots, gradients, list(inputs), iter(weights))
    if not there <= {node for group in groups for node in group["params"]}:
        raise TaskError(
            "--pp-schedule zero-bubble cannot split the backward of a stage that gives values which do not "
            "depend on what it gets. Use --pp-schedule 1f1b, or --pp-split with other numbers."
        )
    return groups


def backward_of_weights(weights: Sequence[nn.Parameter], groups: Groups) -> None:
    """Add to the gradients of ``weights``, from what the first half has left."""
    stage_backward_weight(iter(weights), groups)


def _node(tensor: torch.Tensor) -> Any:
    return _get_grad_fn_or_grad_acc(tensor)
