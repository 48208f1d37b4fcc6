"""Some small models to try on the page, one of them trained a little on real clothes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from plugins.serving.tests.packages import put_module
from safetensors.torch import save
from torch import nn

from paceline.core.inference import InferenceSignature, TensorSpec
from paceline_serving.encodings import Categories, Dates, Vocabulary
from paceline_tasks.fashion_mnist import LABELS, FashionMNISTMLP, load_fashion_mnist


@dataclass(frozen=True)
class Clothes:
    """A model of Fashion-MNIST, and a picture of the test set that it knows.

    Attributes:
        registry: where ``clothes@prod`` is.
        picture: uint8, 28 x 28.
        label: the name of what is on it.
        probabilities: that the model gives it, by label.
    """

    registry: Path
    picture: NDArray[np.uint8]
    label: str
    probabilities: dict[str, float]


def put_clothes(registry: Path) -> Clothes:
    """Train for a hundred steps, export, and choose the first test picture of a bag, a thing easily known."""
    torch.manual_seed(0)
    task = FashionMNISTMLP()
    model = task.build_model()
    images, labels = load_fashion_mnist("train")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(100):
        batch = slice(128 * step, 128 * (step + 1))
        optimizer.zero_grad()
        task.loss(model, [images[batch], labels[batch]]).backward()
        optimizer.step()
    inference = task.inference_signature(model.eval())
    module = inference.module.eval()
    images, labels = load_fashion_mnist("test")
    number = int((labels == LABELS.index("Bag")).nonzero()[0])
    example = {"image": images[number].tolist()}
    put_module(registry, inference, module, save(dict(model.state_dict())), name="clothes", example=example)
    with torch.no_grad():
        probabilities = module(images[number : number + 1])["probabilities"][0]
    return Clothes(
        registry,
        images[number, 0].numpy(),
        LABELS[int(labels[number])],
        dict(zip(LABELS, probabilities.tolist(), strict=True)),
    )


class Mean(nn.Module):
    """The mean of each channel."""

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mean": image.mean(dim=(2, 3))}


class Norm(nn.Module):
    """The length of a vector."""

    def forward(self, point: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"norm": point.norm(dim=1)}


class Visit(nn.Module):
    """Sums of what every kind of input holds."""

    def forward(
        self,
        numbers: torch.Tensor,
        city: torch.Tensor,
        mood: torch.Tensor,
        note: torch.Tensor,
        since: torch.Tensor,
        member: torch.Tensor,
        hours: torch.Tensor,
        plan: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        texts = city * 10 + mood * 1000 + note.sum(1) + since.sum(1)
        parts = [numbers.nan_to_num(100.0).sum(1), texts, member, hours.sum(1), plan.float().mean((1, 2))]
        return {"sum": torch.stack([part.float() for part in parts]).sum(0)}


NOTES = Vocabulary(ids={"good": 2, "bad": 3}, max_length=4)
VISIT = {
    "numbers": TensorSpec(dtype="float32", shape=(2,), columns={"age": "years", "income": "kCHF"}, allow_missing=True),
    "city": TensorSpec(dtype="int64", encoding=Categories({"Bern": 0, "Genf": 1}, missing=2)),
    "mood": TensorSpec(dtype="int64", encoding=Categories({"calm": 0, "tired": 1}, unknown=2)),
    "note": TensorSpec(dtype="int64", shape=(4,), encoding=NOTES),
    "since": TensorSpec(dtype="int64", shape=(3,), encoding=Dates(("year", "weekday"), missing=True)),
    "member": TensorSpec(dtype="bool"),
    "hours": TensorSpec(dtype="float32", shape=(None,)),
    "plan": TensorSpec(dtype="uint8", shape=(8, 8)),
}
"""Inputs of every kind that the page has a field for."""

VISIT_ROW: dict[str, Any] = {
    "numbers": [39.5, None],
    "city": "Genf",
    "mood": "calm",
    "note": "good, not bad",
    "since": "2026-01-31",
    "member": True,
    "hours": [1.5, 2.0, 0.25],
    "plan": [[16 * row + column for column in range(8)] for row in range(8)],
}
VISIT_SUM = 39.5 + 100 + 10 + (2 + 1 + 1 + 3) + (2026 + 5) + 1 + 3.75 + 59.5


def put_visits(registry: Path) -> None:
    """``visits@prod``: a row with an input of every kind, and its example."""
    outputs = {"sum": TensorSpec(dtype="float32", unit="points")}
    inference = InferenceSignature(module=Visit(), inputs=VISIT, outputs=outputs)
    weights = save({"none": torch.zeros(1)})
    put_module(registry, inference, Visit().eval(), weights, name="visits", example=VISIT_ROW)


def put_colours(registry: Path) -> None:
    """``colours@prod``: coloured pictures of floats."""
    _put(registry, "colours", Mean(), ("image", (3, 16, 16)), ("mean", (3,)))


def put_points(registry: Path) -> None:
    """``points@prod``: vectors of two numbers."""
    _put(registry, "points", Norm(), ("point", (2,)), ("norm", ()))


def _put(registry: Path, name: str, module: nn.Module, takes: Any, gives: Any) -> None:
    specs = [{key: TensorSpec(dtype="float32", shape=shape)} for key, shape in (takes, gives)]
    inference = InferenceSignature(module=module, inputs=specs[0], outputs=specs[1])
    put_module(registry, inference, module.eval(), save({"none": torch.zeros(1)}), name=name)
