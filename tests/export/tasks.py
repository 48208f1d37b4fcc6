"""Tasks so small that they are trained and traced in seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.utils.data import TensorDataset

from paceline import Categories, Defaults, InferenceSignature, Task, TensorSpec

SAMPLES = {"train": 96, "val": 32, "test": 70}
SIZE, CLASSES = 6, 3
CALLS: list[int] = []


@dataclass
class Shapes(Task):
    """Which third of a picture is brightest.

    Attributes:
        lr: of SGD.
    """

    lr: float = 0.1
    defaults: ClassVar[Defaults] = Defaults(global_batch_size=32, microbatches=2, best_metric="accuracy:max")

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(4 * SIZE * SIZE, CLASSES),
        )

    def build_dataset(self, split: str) -> TensorDataset:
        generator = torch.Generator().manual_seed(len(split))
        images = torch.rand(SAMPLES[split], 1, SIZE, SIZE, generator=generator)
        labels = images.unflatten(2, (CLASSES, -1)).mean(dim=(1, 3, 4)).argmax(dim=1)
        return TensorDataset(images, labels)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
        return {"accuracy": (model(batch[0]).argmax(dim=1) == batch[1]).float()}

    def inference_signature(self, model: nn.Module) -> InferenceSignature | None:
        return InferenceSignature(
            module=Classifier(model),
            inputs={"image": TensorSpec(dtype="float32", shape=(1, SIZE, SIZE))},
            outputs={
                "probabilities": TensorSpec(dtype="float32", shape=(CLASSES,)),
                "label": TensorSpec(dtype="int64"),
            },
            labels=("top", "middle", "bottom"),
            probabilities="probabilities",
            label="label",
        )

    def inference_batch(self, batch: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        return [batch[0]], batch[1]


class Classifier(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(image)
        return {"probabilities": logits.softmax(dim=1), "label": logits.argmax(dim=1)}


class Drifting(Shapes):
    """Its function depends on how often it was called before."""

    def inference_signature(self, model: nn.Module) -> InferenceSignature | None:
        assert isinstance(model, nn.Sequential)
        inference = super().inference_signature(nn.Sequential(model[:3], Drift(), model[3:]))
        return inference


class Drift(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS.append(1)
        return x * (1 + len(CALLS))


class Branching(Shapes):
    """Its function looks at values, so that it cannot be traced."""

    def inference_signature(self, model: nn.Module) -> InferenceSignature | None:
        return super().inference_signature(nn.Sequential(Branch(), model))


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class Silent(Shapes):
    """It does not say what its model does for others."""

    def inference_signature(self, model: nn.Module) -> InferenceSignature | None:
        return None


class Scaling(Silent):
    """It does not say that pictures are scaled before the model sees them."""

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return super().loss(model, [batch[0] * 2, batch[1]])


class Misnamed(Shapes):
    """Its inputs are not of the type that it says."""

    def inference_batch(self, batch: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        return [batch[0].double()], batch[1]


class Untested(Shapes):
    """It has nothing to be compared on."""

    def build_dataset(self, split: str) -> Any:
        return super().build_dataset(split) if split == "train" else None


TONES = Categories({"dark": 0, "light": 1}, unknown=2)


class Named(Shapes):
    """Clients send a row's numbers by name, and a tone as text."""

    def inference_signature(self, model: nn.Module) -> InferenceSignature | None:
        inference = super().inference_signature(model)
        assert inference is not None
        columns = {f"c{i}": "lux" if i else "" for i in range(SIZE)}
        inputs = {
            "row": TensorSpec(dtype="float32", shape=(SIZE,), columns=columns),
            "tone": TensorSpec(dtype="int64", encoding=TONES),
        }
        outputs = {**inference.outputs}
        outputs["probabilities"] = replace(outputs["probabilities"], unit="of 1")
        return replace(inference, module=Rows(model), inputs=inputs, outputs=outputs)

    def inference_batch(self, batch: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        return [batch[0][:, 0, 0], batch[1] % 2], batch[1]


class Synthetic(Named):
    """Its package shows no real sample."""

    example: ClassVar[dict[str, Any]] = {**{f"c{i}": i / 2 for i in range(SIZE)}, "tone": "light"}

    def inference_signature(self, model: nn.Module) -> InferenceSignature | None:
        inference = super().inference_signature(model)
        assert inference is not None
        return replace(inference, example=self.example)


class WrongExample(Synthetic):
    """Its example lacks a column."""

    example: ClassVar[dict[str, Any]] = {"c0": 1.0, "tone": "light"}


class Rows(Classifier):
    def forward(self, row: torch.Tensor, tone: torch.Tensor) -> dict[str, torch.Tensor]:
        image = row[:, None, None].expand(-1, 1, SIZE, SIZE) * (1 + tone)[:, None, None, None]
        return super().forward(image)
