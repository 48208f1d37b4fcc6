"""Files of tokens for pretraining, mapped into memory: ``--data bin:FILE``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from paceline.core.errors import TaskError

_BLOCK, _BLOCKS = 2**16, 256
"""Bytes, and number, of the parts of a file that its digest is of."""


class TokenFile(Dataset[dict[str, torch.Tensor]]):
    """Consecutive tokens: sample i is ``{"input_ids", "labels"}``, each (context,), int64; no sample is of two files.

    Args:
        files: tokens as little-endian uint16, or uint32 for a vocabulary above 65,536; a shorter rest is left out.
        context: tokens of a sample.

    Attributes:
        digest: of the files' sizes and of parts of them.

    Raises:
        TaskError: a file cannot be read, or has another size than whole tokens have, or there is not one sample.
    """

    def __init__(self, files: Sequence[Path], vocabulary: int, context: int) -> None:
        self._files = list(files)
        self._vocabulary = vocabulary
        self._context = context
        self._type = np.dtype("<u2" if vocabulary <= 2**16 else "<u4")
        for file in self._files:
            try:
                size = file.stat().st_size
            except OSError as error:
                raise TaskError(f"--data bin:{file}: {error.strerror}.") from error
            if size % self._type.itemsize or (len(files) == 1 and size < self._type.itemsize * context):
                raise TaskError(
                    f"--data bin:{file} has {size} bytes: a token is {self._type.itemsize} bytes for a vocabulary of "
                    f"{vocabulary}, and a sample {context} tokens."
                )
        self._files = [file for file in self._files if file.stat().st_size >= self._type.itemsize * context]
        if not self._files:
            raise TaskError(f"--data bin:{files[0]} and its like: none has {context} tokens, which are a sample.")
        self._open()
        self.tokens = len(self) * context
        digests = [_digest(words) for words in self._words]
        self.digest = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        which = int(np.searchsorted(self._starts, number, side="right")) - 1
        start = (number - int(self._starts[which])) * self._context
        words = torch.from_numpy(self._words[which][start : start + self._context].astype(np.int64))
        if int(words.max()) >= self._vocabulary:
            raise TaskError(
                f"{self._files[which]} has token {int(words.max())}, and the model's vocabulary {self._vocabulary} "
                f"tokens. Its tokens must be {self._type.name}, of the model's tokenizer."
            )
        return {"input_ids": words, "labels": words}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_words", "_starts")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def _open(self) -> None:
        try:
            self._words = [np.memmap(file, dtype=self._type, mode="r") for file in self._files]
        except OSError as error:
            raise TaskError(f"--data bin:{error.filename}: {error.strerror}.") from error
        self._starts = np.cumsum([0, *(len(words) // self._context for words in self._words)])


def _digest(words: NDArray[Any]) -> str:
    content = words.view(np.uint8)
    digest = hashlib.sha256(str(len(content)).encode())
    for start in range(0, len(content), max(_BLOCK, len(content) // _BLOCKS)):
        digest.update(content[start : start + _BLOCK].data)
    return digest.hexdigest()
