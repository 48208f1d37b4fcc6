"""What the recipes' models do for others."""

from __future__ import annotations

import pytest
import torch

from paceline.core.task_loading import BUILT_IN_TASKS, build_task, load_task_class

NAMES = ["fashion-mnist", "fashion-mnist-mlp", "transformer"]


def test_every_recipe_can_be_served() -> None:
    assert sorted(BUILT_IN_TASKS) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 3])
def test_inputs_and_outputs_are_as_they_are_described(name: str, size: int) -> None:
    task = build_task(load_task_class(name), {"layers": 1, "width": 8, "heads": 2} if name == "transformer" else {})
    model = task.build_model().eval()
    inference = task.inference_signature(model)
    assert inference is not None
    data = task.build_dataset("test")
    inputs, classes = task.inference_batch(task.collate([data[i] for i in range(size)]))
    assert classes is not None
    assert (classes.shape, classes.dtype) == ((size,), torch.int64)
    with torch.no_grad():
        outputs = inference.module(*inputs)
    for tensors, specs in (
        (dict(zip(inference.inputs, inputs, strict=True)), inference.inputs),
        (outputs, inference.outputs),
    ):
        assert list(tensors) == list(specs)
        for tensor, spec in zip(tensors.values(), specs.values(), strict=True):
            assert str(tensor.dtype) == f"torch.{spec.dtype}"
            assert tensor.shape[0] == size
            assert all(is_ in (None, has) for is_, has in zip(spec.shape, tensor.shape[1:], strict=True))
    assert torch.equal(outputs[inference.probabilities].argmax(dim=1), outputs[inference.label])
    torch.testing.assert_close(outputs[inference.probabilities].sum(dim=1), torch.ones(size))
