"""The built-in task `fashion-mnist`: a small ConvNet on Fashion-MNIST."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import logging
import math
import os
import urllib.request
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from rich.progress import wrap_file
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

from paceline.core.errors import DataError
from paceline.core.files import rename, user_directory
from paceline.core.inference import InferenceSignature, TensorSpec
from paceline.core.output import Console
from paceline.core.ownership import locked
from paceline.core.task import Defaults, Task

# --- Fashion-MNIST (Xiao, Rasul, Vollgraf 2017, https://arxiv.org/abs/1708.07747): find it, fetch it, read
#     it
#
# Paceline searches ``$PACELINE_DATA/fashion-mnist`` (default ``~/.cache/paceline/fashion-mnist``), then the directory
# of Debian's ``dataset-fashion-mnist``, or else downloads the data into the first. It compares the SHA-256 digests of
# the *uncompressed* files, because Debian recompresses them and the ``.gz`` files of the two sources differ.


DEBIAN_DIRECTORY = Path("/usr/share/datasets/fashion-mnist")
MIRRORS = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets",
)
"""The authors' repository, and the copy that Keras uses; tried in this order."""

_log = logging.getLogger(__name__)
_DAMAGED = (OSError, EOFError, zlib.error)
_MAX_DOWNLOAD_BYTES = 32 * 2**20  # the largest of the four files has 25.2 MiB
_TIMEOUT_S = 30.0


class IdxFile(NamedTuple):
    """One of the four files: its shape (uint8) and the SHA-256 of what it holds, decompressed."""

    name: str
    shape: tuple[int, ...]
    sha256: str


FILES = {
    "train": (
        IdxFile(
            "train-images-idx3-ubyte.gz",
            (60_000, 28, 28),
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        ),
        IdxFile(
            "train-labels-idx1-ubyte.gz",
            (60_000,),
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        ),
    ),
    "test": (
        IdxFile(
            "t10k-images-idx3-ubyte.gz",
            (10_000, 28, 28),
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        ),
        IdxFile(
            "t10k-labels-idx1-ubyte.gz",
            (10_000,),
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
}
"""The (images, labels) files of each split."""


def cache_directory() -> Path:
    """Return the directory for downloads: ``fashion-mnist`` in ``$PACELINE_DATA``, else in the user's XDG cache."""
    data = os.environ.get("PACELINE_DATA")
    if data:
        return Path(data).expanduser() / "fashion-mnist"
    return user_directory("cache") / "fashion-mnist"


def load_fashion_mnist(
    split: str,
    *,
    installed: Path = DEBIAN_DIRECTORY,
    mirrors: Sequence[str] = MIRRORS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a split, downloading it first where this machine has none.

    Args:
        split: "train" (N = 60,000) or "test" (N = 10,000).

    Returns:
        Images, uint8 (N, 1, 28, 28), and labels, int64 (N,).
    """
    if split not in FILES:
        raise DataError(f"Fashion-MNIST has no split {split!r}; it has {' and '.join(FILES)}.")
    problems: list[str] = []
    for directory in (cache_directory(), installed):
        found = _read_split(directory, split, problems)
        if found is not None:
            return found
    found = _read_split(_download(mirrors, problems), split, problems)
    if found is None:
        raise _nowhere(problems)
    return found


def read_idx(path: Path, file: IdxFile) -> torch.Tensor:
    """Decompress and check one file; never holds more than its known size.

    The format: a header of 4 bytes and 4 for each dimension, then the data (http://yann.lecun.com/exdb/mnist/).

    Returns:
        uint8, of ``file.shape``.

    Raises:
        DataError: the file is damaged, or another one.
        FileNotFoundError: there is none.
    """
    header = 4 + 4 * len(file.shape)
    try:
        with gzip.open(path) as stream:
            content = bytearray(stream.read(header + math.prod(file.shape) + 1))
    except FileNotFoundError:
        raise
    except _DAMAGED as error:
        raise DataError(f"{path} is damaged or cannot be read: {error}") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.sha256:
        raise DataError(f"{path} is not the published file: SHA-256 {digest}, expected {file.sha256}.")
    return torch.frombuffer(content, dtype=torch.uint8, offset=header).view(file.shape)


def _read_split(directory: Path, split: str, problems: list[str]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Read the split's tensors; None if a file is missing or damaged, which is added to ``problems``."""
    try:
        images, labels = (read_idx(directory / file.name, file) for file in FILES[split])
    except FileNotFoundError:
        return None
    except DataError as error:
        problems.append(str(error))
        return None
    return images.unsqueeze(1), labels.to(torch.int64)


def _download(mirrors: Sequence[str], problems: list[str]) -> Path:
    """Fetch what is missing or damaged in the cache; of several processes one does, the others wait."""
    directory = cache_directory()
    for problem in problems:
        _log.warning("%s", problem)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory / ".lock"):
            missing = [file for pair in FILES.values() for file in pair if not _is_whole(directory, file)]
            # Only after waiting for the lock, whose previous holder has usually fetched everything.
            for file in missing:
                _fetch(file, directory, mirrors, problems)
    except OSError as error:
        problems.append(f"{directory}: {error.strerror or error}")
        raise _nowhere(problems) from error
    return directory


def _is_whole(directory: Path, file: IdxFile) -> bool:
    try:
        read_idx(directory / file.name, file)
    except (FileNotFoundError, DataError):
        return False
    return True


def _fetch(file: IdxFile, directory: Path, mirrors: Sequence[str], problems: list[str]) -> None:
    """Download one file under a temporary name, check it, and only then rename it."""
    temporary = directory / f".{file.name}.{os.getpid()}"
    try:
        for mirror in mirrors:
            url = f"{mirror.rstrip('/')}/{file.name}"
            try:
                _save(url, temporary)
                read_idx(temporary, file)
            except (OSError, http.client.HTTPException, DataError) as error:
                problems.append(f"{url}: {error}")
                continue
            rename(temporary, directory / file.name)
            return
    finally:
        temporary.unlink(missing_ok=True)
    raise _nowhere(problems)


def _save(url: str, path: Path) -> None:
    """Write what ``url`` serves to ``path``, with a progress bar on a terminal.

    Raises:
        OSError, HTTPException: the mirror does not answer, or the file cannot be written.
        DataError: the mirror serves less than it announces, or more than the largest of the files has.
    """
    console = Console(stderr=True)
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response, path.open("wb") as out:
        announced = response.headers.get("Content-Length", "")
        size = int(announced) if announced.isdecimal() else 0
        received = 0
        title = f"Fashion-MNIST {url.rpartition('/')[2]}"
        shown = wrap_file(
            response, size, description=title, console=console, transient=True, disable=not console.is_terminal
        )
        with shown as body:
            while chunk := body.read(1 << 16):
                received += len(chunk)
                if received > _MAX_DOWNLOAD_BYTES:
                    raise DataError(f"it is larger than {_MAX_DOWNLOAD_BYTES} bytes, so not the published file.")
                out.write(chunk)
        if received < size:
            raise DataError(f"the transfer was interrupted after {received} of {size} bytes.")


def _nowhere(problems: Sequence[str]) -> DataError:
    names = ", ".join(file.name for pair in FILES.values() for file in pair)
    return DataError(
        "Fashion-MNIST is not on this machine and could not be downloaded. One of these three ways helps:\n"
        "  apt-get install dataset-fashion-mnist      (Debian and Ubuntu, as root)\n"
        f"  put {names}\n      into {cache_directory()}      (PACELINE_DATA=DIR: into DIR/fashion-mnist)\n"
        f"  give this machine access to {MIRRORS[0]}"
        + "".join(f"\n  What failed: {problem}" for problem in dict.fromkeys(problems))
    )


# --- Fashion-MNIST: a small ConvNet that reaches 90.5 % in three epochs, and an MLP for benchmarks ---


PIXEL_MEAN, PIXEL_STD = 0.2860, 0.3530
"""Of the 60,000 training images, on a scale of 0 to 1."""

LABELS = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
"""The classes, by number."""


@dataclass
class FashionMNIST(Task):
    """Two convolutions with batch norm and one linear layer, by SGD under a one-cycle schedule.

    The schedule is Smith & Topin's "Super-Convergence" (https://arxiv.org/abs/1708.07120).

    Attributes:
        lr: the peak of the one-cycle schedule.
        momentum: of SGD, constant over the cycle.
    """

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0

    defaults: ClassVar[Defaults] = Defaults(
        global_batch_size=128,
        microbatches=4,
        epochs=3,
        best_metric="accuracy:max",
        search=("lr=log:1e-3:1", "momentum=uniform:0.5:0.95", "weight_decay=log:1e-6:1e-2"),
    )

    def build_model(self) -> nn.Module:
        """Build a ConvNet: images (B, 1, 28, 28) -> logits (B, 10); 29,000 parameters."""
        return nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5, padding=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=5, padding=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(7 * 7 * 32, 10),
        )

    def build_dataset(self, split: str) -> TensorDataset | None:
        """Build the published splits, "train" (60,000) and "test" (10,000); ``--val-fraction`` carves a "val"."""
        return TensorDataset(*load_fashion_mnist(split)) if split in FILES else None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> OneCycleLR:
        """Up to ``lr`` in the first 30 % of the steps, then down to almost nothing."""
        return OneCycleLR(optimizer, max_lr=self.lr, total_steps=total_steps, pct_start=0.3, cycle_momentum=False)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(model(normalise(images)), labels)

    def metrics(self, model: nn.Module, batch: list[torch.Tensor]) -> Mapping[str, Any]:
        """Accuracy (0 or 1) and cross-entropy of each sample."""
        images, labels = batch
        logits = model(normalise(images))
        return {
            "accuracy": (logits.argmax(dim=1) == labels).float(),
            "loss": functional.cross_entropy(logits, labels, reduction="none"),
        }

    def inference_signature(self, model: nn.Module) -> InferenceSignature:
        """Images as the dataset has them, uint8 (B, 1, 28, 28), -> probabilities (B, 10) and labels (B,)."""
        return InferenceSignature(
            module=Classifier(model),
            inputs={"image": TensorSpec(dtype="uint8", shape=(1, 28, 28))},
            outputs={
                "probabilities": TensorSpec(dtype="float32", shape=(len(LABELS),)),
                "label": TensorSpec(dtype="int64"),
            },
            labels=LABELS,
            probabilities="probabilities",
            label="label",
        )

    def inference_batch(self, batch: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        images, labels = batch
        return [images], labels


class Classifier(nn.Module):
    """From pixels to classes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        """Images, uint8 (B, 1, 28, 28) -> probabilities, float32 (B, 10), and labels, int64 (B,)."""
        logits = self.model(normalise(image))
        return {"probabilities": logits.softmax(dim=1), "label": logits.argmax(dim=1)}


@dataclass
class FashionMNISTMLP(FashionMNIST):
    """784-32-10, so small that the step is nearly all framework: for benchmarks of the framework."""

    def build_model(self) -> nn.Module:
        """Build an MLP: images (B, 1, 28, 28) -> logits (B, 10); 25,450 parameters."""
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


def normalise(images: torch.Tensor) -> torch.Tensor:
    """uint8 pixels -> float32 of mean 0 and standard deviation 1, same shape."""
    return (images.float() - 255 * PIXEL_MEAN) * (1 / (255 * PIXEL_STD))
