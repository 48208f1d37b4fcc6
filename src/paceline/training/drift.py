"""How far a fine-tuned model has gone from its parent: in its weights, and in what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.data.evaluation import EvalBatches
from paceline.task import Task
from paceline.training.initialisation import names_of_the_new
from paceline.training.parent import Parent
from paceline.training.run import Run

COMPARED_SAMPLES = 2048
"""About so many samples of the test split, evenly spaced, are predicted by both models."""

_BLOCK = 64  # samples


def drift(run: Run, parent: Parent, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What ``result.json`` says of the way from parent to child; nothing is trained.

    Args:
        run: the child's.
        parent: what it began with.
        weights: the child's, of the task's model without adapters.

    Returns:
        ``relative_l2``, the 2-norm of the change over that of the parent's weights, over all parameters that
        began with the parent's; ``modules``, the same for each module that has parameters of its own;
        ``agreement``, the share of ``samples`` test samples that both give the same class, None where the
        task predicts no classes or its last layer began anew.
    """
    child = run.task.build_model()
    anew = names_of_the_new(child, run.config)
    parameters = [name for name, _ in child.named_parameters() if name not in anew]
    whole, modules = relative_l2(parameters, parent.weights, weights)
    agreement, samples = None, 0
    if not anew:
        agreement, samples = _agreement(run, child, parent.weights, weights)
    return {
        "relative_l2": whole,
        "modules": modules,
        "agreement": agreement,
        "samples": samples,
        "new": sorted(anew),
    }


def relative_l2(
    names: Sequence[str], before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> tuple[float | None, dict[str, float | None]]:
    """The relative 2-norm of the change over all of these parameters, and over those of each module.

    None where the parent's weights are all zero.
    """
    squares: dict[str, list[tuple[float, float]]] = {}
    for name in names:
        old, new = before[name].detach().cpu().double(), after[name].detach().cpu().double()
        pair = float((new - old).square().sum()), float(old.square().sum())
        squares.setdefault(name.rpartition(".")[0], []).append(pair)
    everywhere = [pair for pairs in squares.values() for pair in pairs]
    return _ratio(everywhere), {module: _ratio(pairs) for module, pairs in squares.items()}


def _ratio(pairs: Sequence[tuple[float, float]]) -> float | None:
    change, size = (sum(values) for values in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    return (change / size) ** 0.5 if size else None


def _agreement(
    run: Run, model: nn.Module, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> tuple[float | None, int]:
    task = run.task
    dataset = task.build_dataset("test")
    inference = task.build_inference(model.eval())
    if dataset is None or inference is None or inference.label is None:
        return None, 0
    batches = EvalBatches(
        dataset,
        _BLOCK,
        seed=run.config.seed,
        device=torch.device("cpu"),
        workers=0,
        collate=task.collate,
        split="test",
    )
    with closing(batches):
        count = min(batches.num_blocks, max(1, COMPARED_SAMPLES // _BLOCK))
        blocks = np.linspace(0, batches.num_blocks - 1, count).astype(int).tolist()
        said = [_predictions(task, model, weights, batches, blocks) for weights in (before, after)]
    return float((said[0] == said[1]).double().mean()), len(said[0])


@torch.no_grad()
def _predictions(
    task: Task,
    model: nn.Module,
    weights: Mapping[str, torch.Tensor],
    batches: EvalBatches,
    blocks: Sequence[int],
) -> torch.Tensor:
    """The class of each sample, (N,), as a model with these weights says."""
    model.load_state_dict(dict(weights))
    inference = task.build_inference(model.eval())
    assert inference is not None
    assert inference.label is not None
    module = inference.module.eval()
    return torch.cat(
        [
            module(*task.inference_batch(batch.batch)[0])[inference.label].reshape(-1)
            for batch in batches.read(blocks)
        ]
    )
