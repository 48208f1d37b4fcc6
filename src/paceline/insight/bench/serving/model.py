"""The ConvNet that all serve, as a package; untrained, since speed does not depend on what it knows."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.runs.checkpoint_manifest import FileRecord
from paceline.runs.package_manifest import MANIFEST, PackageManifest, Provenance

if TYPE_CHECKING:
    from torch import nn

RECIPE = "fashion-mnist"
WEIGHTS = "weights.safetensors"


def build_classifier(seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """The module from pixels to classes, and the model inside of it."""
    import torch

    from paceline.training.tasks.fashion_mnist import Classifier, FashionMNIST

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = FashionMNIST().build_model().eval()
    return Classifier(model).eval(), model


def write_package(directory: Path, seed: int = 0) -> None:
    """A package with the weights alone, which is served with the recipe's code and takes no trust."""
    from safetensors.torch import save

    from paceline.training.tasks.fashion_mnist import FashionMNIST

    _, model = build_classifier(seed)
    inference = FashionMNIST().inference_signature(model)
    weights = save({name: tensor.contiguous() for name, tensor in model.state_dict().items()})
    sha256 = hashlib.sha256(weights).hexdigest()
    manifest = PackageManifest(
        name=RECIPE,
        created="2026-01-01T00:00:00+00:00",
        inputs=inference.inputs,
        outputs=inference.outputs,
        provenance=Provenance(
            run="none",
            task=RECIPE,
            fields={},
            step=0,
            state_version=0,
            model_sha256=sha256,
            data={},
            versions={},
        ),
        files={WEIGHTS: FileRecord(sha256=sha256, size=len(weights))},
        labels=inference.labels,
        probabilities=inference.probabilities,
        label=inference.label,
    )
    directory.mkdir()
    (directory / WEIGHTS).write_bytes(weights)
    (directory / MANIFEST).write_bytes(manifest.to_bytes())
