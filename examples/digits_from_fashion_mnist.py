"""From clothes to handwritten digits: the ConvNet of Fashion-MNIST, fine-tuned on a hundred digits.

    paceline train fashion-mnist --epochs 1 --run-dir runs/clothes
    paceline train examples/digits_from_fashion_mnist.py:Digits --init-from runs/clothes@last \
        --reset-head --lr-scale 0=0.1 --run-dir runs/digits
    paceline runs show runs/digits

The digits are scikit-learn's, 1,797 of 8x8 pixels; ``--set samples=1000`` trains on more of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from sklearn.datasets import load_digits
from torch.nn import functional
from torch.utils.data import TensorDataset

import paceline
from paceline.core.inference import InferenceSignature
from paceline_tasks.fashion_mnist import Classifier, FashionMNIST

_EVERY = 4  # of so many digits one is for testing


@dataclass
class Digits(FashionMNIST):
    """Fashion-MNIST's model and training on digits.

    Attributes:
        samples: of the 1,347 training digits, so many are used.
    """

    lr: float = 0.01
    samples: int = 100

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=20, microbatches=2, epochs=15)

    def build_dataset(self, split: str) -> TensorDataset | None:
        if split == "val":
            return None
        pixels, labels = load_digits(return_X_y=True)
        number = torch.arange(len(labels))
        chosen = number[number % _EVERY == 0] if split == "test" else number[number % _EVERY != 0][: self.samples]
        images, labels = torch.from_numpy(pixels).float(), torch.from_numpy(labels).long()
        # 8x8 of 0 to 16 -> 28x28 of 0 to 255, as the clothes are.
        enlarged = functional.interpolate(images[chosen].view(-1, 1, 8, 8) * (255 / 16), size=28, mode="bilinear")
        return TensorDataset(enlarged.round().to(torch.uint8), labels[chosen])

    def inference_signature(self, model: torch.nn.Module) -> InferenceSignature:
        inference = super().inference_signature(model)
        return InferenceSignature(
            module=Classifier(model),
            inputs=inference.inputs,
            outputs=inference.outputs,
            labels=tuple("0123456789"),
            probabilities=inference.probabilities,
            label=inference.label,
        )


if __name__ == "__main__":
    paceline.fit(Digits())
