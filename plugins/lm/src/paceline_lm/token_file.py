"""A file of tokens for pretraining, mapped into memory: ``--data bin:FILE``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from paceline.core.errors import TaskError

_BLOCK, _BLOCKS = 2**16, 256
"""Bytes, and number, of the parts of a file that its digest is of."""


class TokenFile(Dataset[dict[str, torch.Tensor]]):
    """Consecutive tokens: sample i is ``{"input_ids", "labels"}``, each (context,), int64; a shorter rest is left out.

    Args:
        file: tokens as little-endian uint16, or uint32 for a vocabulary above 65,536.
        vocabulary: tokens are below.
        context: tokens of a sample.

    Attributes:
        digest: of the file's size and of parts of it.

    Raises:
        TaskError: the file cannot be read, or has another size than whole tokens have, or less than one sample.
    """

    def __init__(self, file: Path, vocabulary: int, context: int) -> None:
        self._file = file
        self._vocabulary = vocabulary
        self._context = context
        self._type = np.dtype("<u2" if vocabulary <= 2**16 else "<u4")
        try:
            size = file.stat().st_size
            if size % self._type.itemsize or size < self._type.itemsize * context:
                raise TaskError(
                    f"--data bin:{file} has {size} bytes: a token is {self._type.itemsize} bytes for a vocabulary of "
                    f"{vocabulary}, and a sample {context} tokens."
                )
            self._open()
        except OSError as error:
            raise TaskError(f"--data bin:{file}: {error.strerror}.") from error
        digest, content = hashlib.sha256(str(size).encode()), self._tokens.view(np.uint8)
        for start in range(0, size, max(_BLOCK, size // _BLOCKS)):
            digest.update(content[start : start + _BLOCK].data)
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._tokens) // self._context

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = number * self._context
        words = torch.from_numpy(self._tokens[start : start + self._context].astype(np.int64))
        if int(words.max()) >= self._vocabulary:
            raise TaskError(
                f"{self._file} has token {int(words.max())}, and the model's vocabulary {self._vocabulary} tokens. Its "
                f"tokens must be {self._type.name}, of the model's tokenizer."
            )
        return {"input_ids": words, "labels": words}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_tokens"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def _open(self) -> None:
        self._tokens = np.memmap(self._file, dtype=self._type, mode="r")
