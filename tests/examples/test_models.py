"""The models of the examples: what their docstrings promise."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reversible() -> Any:
    return example("reversible_block")


def gradients(reversible: Any, *, invert: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(1)
    model = reversible.Classifier(8, 3, invert=invert).double()
    loss = torch.nn.functional.cross_entropy(model(torch.randint(256, (5, 1, 28, 28)).double()), torch.arange(5))
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


def test_gradients_by_inversion_are_the_plain_ones(reversible: Any) -> None:
    (plain_loss, plain), (loss, inverted) = (gradients(reversible, invert=invert) for invert in (False, True))
    assert loss == plain_loss
    assert len(plain) == 2 + 3 * 2 * 6 + 2
    for expected, found in zip(plain, inverted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_block_is_inverted(reversible: Any) -> None:
    torch.manual_seed(2)
    block = reversible.ReversibleBlock(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    torch.testing.assert_close(torch.stack(block.inverse(*block(*x))), x)


def test_a_reversible_stack_keeps_as_much_whatever_its_depth(reversible: Any) -> None:
    def kept(depth: int, *, invert: bool) -> int:
        sizes: list[int] = []
        stack = reversible.Classifier(8, depth, invert=invert).stack
        parameters = {id(parameter) for parameter in stack.parameters()}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in parameters:
                sizes.append(tensor.nbytes)
            return tensor

        x = torch.randn(2, 16, 8, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            stack(x[0], x[1])
        return sum(sizes)

    assert kept(2, invert=True) == kept(8, invert=True) < kept(2, invert=False) < kept(8, invert=False)


def test_resnet18_has_its_published_size() -> None:
    resnet18 = example("resnet18_fashion_mnist").resnet18
    model = resnet18(64, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_172_810
    assert sum(isinstance(module, torch.nn.Conv2d) for module in model.modules()) == 20
    assert resnet18(4, 10)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
