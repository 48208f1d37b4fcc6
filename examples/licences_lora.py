"""From Python to legal English: the small transformer, with low-rank adapters on Debian's licences.

    paceline train transformer --max-steps 300 --run-dir runs/python
    paceline train examples/licences_lora.py:Licences --init-from runs/python \
        --lora 'rank=8,alpha=16,target=query|value' --run-dir runs/licences
    paceline runs show runs/licences

Only the adapters are trained: 2 % of what the transformer has. Every Debian has the texts in
``/usr/share/common-licenses``; ``--set root=DIR`` takes the plain text files of another folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch.utils.data import TensorDataset

import paceline
from paceline.core.errors import DataError
from paceline_tasks.transformer import Transformer

_PARTS = {"train": (0, 8), "val": (8, 9), "test": (9, 10)}
"""Tenths of each text."""


@dataclass
class Licences(Transformer):
    """The transformer's training, on other text.

    Attributes:
        root: the folder of the texts; links are left out.
    """

    lr: float = 5e-3
    root: str = "/usr/share/common-licenses"

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(
        global_batch_size=16, microbatches=4, best_metric="bits_per_byte:min"
    )

    def build_dataset(self, split: str) -> TensorDataset | None:
        folder = Path(self.root).expanduser()
        texts = [path.read_bytes() for path in sorted(folder.glob("*")) if path.is_file() and not path.is_symlink()]
        first, last = _PARTS[split]
        text = b"".join(text[len(text) * first // 10 : len(text) * last // 10] for text in texts)
        if len(text) <= self.context:
            raise DataError(f"{folder} holds no texts that are long enough. Name another folder: --set root=DIR.")
        windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, self.context + 1, self.context)
        return TensorDataset(windows if split == "train" else windows[: self.held_out])


if __name__ == "__main__":
    paceline.fit(Licences())
