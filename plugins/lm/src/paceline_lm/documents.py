"""Documents of JSONL and Parquet files as tokens: encoded once, cached for the user, and mapped by every process."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from paceline.core.errors import TaskError
from paceline.core.files import parse_json, user_directory
from paceline_lm.encoding import Encoder
from paceline_lm.token_loss import IGNORED

MARK = b"\xef\xbb\xbf"
"""Which some editors write before the first line."""

_COMPRESSED = {b"\x1f\x8b": "gunzip", b"\x28\xb5\x2f\xfd": "unzstd", b"BZh": "bunzip2", b"\xfd7zXZ": "unxz"}

_EXAMPLE = '{"text": "..."}'

_FORMAT = 7
"""Of the cached file; another way to encode documents is another number."""


class Documents(Dataset[dict[str, torch.Tensor]]):
    """Tokenised documents: sample i is ``{"input_ids": (n,), "labels": (n,)}``, int64.

    A label is -100 where the model is not trained to predict the token, as is the first one of each document.

    Attributes:
        digest: of the tokens and their labels.
        counts: documents that were left out because they have no label (``unlabelled``), documents that were cut
            (``cut``), their tokens that are left out (``tokens_cut``), texts that were divided (``divided``), documents
            whose labels have no special token, such as the end of a turn (``endless``), tokens with a label
            (``labels``), and the largest token (``largest``).
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._open()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        start, stop = int(self._offsets[number]), int(self._offsets[number + 1])
        words = self._tokens[start:stop].long()
        labels = torch.where(self._labelled[start:stop].bool(), words, IGNORED)
        return {"input_ids": words, "labels": labels}

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self._file}  # data workers map the file themselves

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._file = state["file"]
        self._open()

    def _open(self) -> None:
        with safe_open(self._file, "pt") as tensors:
            self._tokens = tensors.get_tensor("tokens")
            self._labelled = tensors.get_tensor("labelled")
            self._offsets: NDArray[np.int64] = tensors.get_tensor("offsets").numpy()
            recorded = tensors.metadata()
        self.digest = recorded["digest"]
        self.counts: dict[str, int] = parse_json(recorded["counts"])
        self.lengths: NDArray[np.int64] = np.diff(self._offsets)
        self.tokens = int(self._offsets[-1])


def read_documents(files: Sequence[Path], tokenizer: PreTrainedTokenizerBase, context: int) -> Documents:
    """Return the documents of JSONL or Parquet files, which the first process of a node encodes.

    Args:
        context: most tokens of a document.

    Raises:
        TaskError: a file cannot be read, a line is not a document, or no document has a label.
    """
    encoder = Encoder(tokenizer, context)
    with ExitStack() as stack:
        contents = []
        for file in files:
            try:
                contents.append(stack.enter_context(file.open("rb")))
            except OSError as error:
                raise TaskError(f"--data {file}: {error.strerror}.") from error
        stack.enter_context(_lock(contents[0]))
        name = _name(contents, tokenizer, context)
        encoded = user_directory("cache") / "tokens" / f"{name}.safetensors"
        if not encoded.is_file():
            encoded.parent.mkdir(parents=True, exist_ok=True)
            _encode(files, encoded, encoder)
    return Documents(encoded)


@contextmanager
def _lock(content: BufferedReader) -> Iterator[None]:
    """Let one process of a node encode; where a file system has no locks, several do, to the same file."""
    with suppress(OSError):
        fcntl.flock(content, fcntl.LOCK_EX)
    yield


def _name(contents: Sequence[BufferedReader], tokenizer: PreTrainedTokenizerBase, context: int) -> str:
    """Return a digest of all that decides the tokens."""
    settings = {
        "format": _FORMAT,
        "documents": [hashlib.file_digest(content, "sha256").hexdigest() for content in contents],
        "tokenizer": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest(),
        "chat_template": tokenizer.chat_template,
        "special_tokens": {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())},
        "context": context,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _encode(files: Sequence[Path], target: Path, encoder: Encoder) -> None:
    tokens, labelled, offsets = array("i"), bytearray(), array("q", [0])
    counts = {"unlabelled": 0, "cut": 0, "tokens_cut": 0, "divided": 0, "endless": 0, "labels": 0, "largest": 0}
    for where, record in itertools.chain.from_iterable(map(_records, files)):
        try:
            pieces = encoder(parse_line(record) if isinstance(record, bytes) else record)
        except TaskError as error:
            raise TaskError(f"--data {where}: {error}") from error
        if not any(any(piece.labelled) for piece in pieces):
            counts["unlabelled"] += 1
            continue
        num_cut = pieces[-1].num_cut
        counts["cut"] += num_cut > 0
        counts["tokens_cut"] += num_cut
        counts["divided"] += len(pieces) > 1
        learned = itertools.chain.from_iterable(compress(piece.tokens, piece.labelled) for piece in pieces)
        counts["endless"] += not num_cut and not any(map(encoder.special.__contains__, learned))
        for piece in pieces:
            counts["labels"] += sum(piece.labelled)
            counts["largest"] = max(counts["largest"], *piece.tokens)
            tokens.extend(piece.tokens)
            labelled.extend(piece.labelled)
            offsets.append(len(tokens))
    if len(offsets) == 1:
        if not counts["unlabelled"]:
            raise TaskError(f"--data {files[0]} is empty. Each line is a document, such as {_EXAMPLE}")
        raise TaskError(
            f"--data {files[0]}: none of its {counts['unlabelled']} documents has a token to learn. A chat needs an "
            'answer, a message with "role": "assistant", and it must begin within --context tokens.'
        )
    digest = hashlib.sha256()
    for part in (tokens, labelled, offsets):
        digest.update(part)
    temporary = target.with_name(f".{target.name}.{os.uname().nodename}-{os.getpid()}")
    try:
        save_file(
            {
                "tokens": torch.frombuffer(tokens, dtype=torch.int32),
                "labelled": torch.frombuffer(labelled, dtype=torch.uint8),
                "offsets": torch.frombuffer(offsets, dtype=torch.int64),
            },
            temporary,
            {"digest": digest.hexdigest(), "counts": json.dumps(counts)},
        )
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _records(file: Path) -> Iterator[tuple[str, Mapping[str, Any] | bytes]]:
    """Yield each record, as the line of JSON or as a row, with its place for messages."""
    if file.suffix == ".parquet":
        try:
            for number, row in enumerate(rows_of(file), 1):
                yield f"{file}, row {number}", row
        except ModuleNotFoundError as error:
            raise TaskError(f"--data {file}: Parquet needs pyarrow: pip install pyarrow") from error
        except (OSError, ValueError) as error:
            raise TaskError(f"--data {file} cannot be read as Parquet: {error}") from error
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.removeprefix(MARK).strip():
                yield f"{file}, line {number}", line


def rows_of(file: Any, row_group: int | None = None) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a Parquet file, or of one of its row groups, without what is null in them.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
        OSError, ValueError: the file cannot be read.
    """
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(row_groups=None if row_group is None else [row_group]):
                for row in batch.to_pylist():
                    yield {name: value for name, value in row.items() if value is not None}
    except ArrowException as error:
        raise ValueError(str(error)) from error


def parse_line(line: bytes) -> Mapping[str, Any]:
    """Return the record of a line, which may begin with a byte order mark.

    Raises:
        TaskError: it is not a JSON object.
    """
    for start, tool in _COMPRESSED.items():
        if line.startswith(start):
            raise TaskError(f"the file is compressed: {tool} it first.")
    try:
        record = parse_json(line.removeprefix(MARK))
    except ValueError as error:
        raise TaskError(
            f"this is not JSON: {error}. Each line has one object, such as {_EXAMPLE}: jq -c . FILE writes JSON of "
            "several lines so."
        ) from error
    if isinstance(record, list):
        raise TaskError("this is a JSON array; each line has one object: jq -c '.[]' FILE.")
    if not isinstance(record, dict):
        raise TaskError(f"this is not a JSON object, such as {_EXAMPLE}")
    return record


def pad_documents(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Return a batch of documents, padded on the right to the longest: (B, n), with an ``attention_mask``."""
    words, labels = ([sample[name] for sample in samples] for name in ("input_ids", "labels"))
    return {
        "input_ids": pad_sequence(words, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        "attention_mask": pad_sequence([torch.ones_like(each) for each in words], batch_first=True),
    }
