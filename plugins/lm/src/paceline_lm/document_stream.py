"""Documents of JSONL and Parquet files that are read and encoded as the training goes: ``--data stream:PLACE``."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from threading import Lock, Thread
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from fsspec.core import url_to_fs

from paceline.core.errors import DataError, TaskError
from paceline.data.order import Permutation, derive_key
from paceline_lm.documents import MARK, parse_line, rows_of
from paceline_lm.encoding import Encoded, Encoder
from paceline_lm.packing import ConcatenatedDocuments, PackedDocuments
from paceline_lm.token_loss import IGNORED

_BLOCKS, _SAMPLES, _PACKS = 31, 32, 33  # domains of the keys
_BLOCK_BYTES = 2**20
"""Of JSONL; the most of a shard that a resumed run reads again."""
_LEAST_BLOCKS = 16
"""Of each shard, so that all end at about the same step."""
_LINE_BYTES = 64
"""The least to read beyond a block for the end of its last line."""
_FIRST_BYTES, _FIRST_DOCUMENTS, _FIRST_FILES = 2**16, 256, 16
"""What is encoded at the start, at most, to know about how long documents are."""
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5")

Sample = tuple[dict[str, torch.Tensor], int]
"""A sample, and how many documents begin in it."""


class DocumentBlock(NamedTuple):
    """Documents that are read together: lines of JSONL that begin in a range of bytes, or rows of Parquet.

    Attributes:
        stop: after its last byte; None for Parquet, where ``start`` is the number of the row group.
        part: its rows k, k + n, k + 2 n, ... as (k, n).
    """

    file: str
    start: int
    stop: int | None
    part: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class _EncodedBlock:
    """Documents in memory, as :class:`~paceline_lm.documents.Documents` gives them."""

    documents: list[Encoded]

    @property
    def lengths(self) -> Any:
        return np.array([len(document.tokens) for document in self.documents])

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        words = torch.tensor(self.documents[number].tokens)
        labels = torch.where(torch.tensor(self.documents[number].labelled), words, IGNORED)
        return {"input_ids": words, "labels": labels}


class DocumentStream:
    """A :class:`~paceline.data.stream.ShardedStream` of documents, or of packs of them.

    The files are blocks, in another order in each epoch, which shard k takes modulo S. So a block is read by one rank,
    once in an epoch. Its documents, or packs of documents of the block, are in another order in each epoch, too. A
    position is a block and a sample in it: a resumed run reads nothing before this block.

    Args:
        place: a file, a pattern, or an address of either.
        vocabulary: tokens are below.
        pack: tokens of a pack; None: documents are samples.
        concat: join the documents of a block and cut them into packs, in place of packing whole ones.

    Attributes:
        digest: of the files' names, sizes and versions.

    Raises:
        TaskError: there is no such file, or the store does not give it.
    """

    units: ClassVar[Mapping[str, int]] = {"documents": 0}
    run_samples: int | None = None

    def __init__(
        self, place: str, encoder: Encoder, vocabulary: int, pack: int | None, *, concat: bool = False
    ) -> None:
        self.name = f"--data stream:{place}"
        self._encoder = encoder
        self._vocabulary = vocabulary
        self._pack = pack
        self._concat = concat
        self._encoding = Lock()  # a tokenizer fails in several threads
        try:
            self._store, pattern = url_to_fs(place)
            found = self._store.glob(pattern, detail=True) if set("*?[") & set(pattern) else None
            infos = [self._store.info(pattern)] if found is None else [found[path] for path in sorted(found)]
        except Exception as error:  # each store has its own
            raise TaskError(f"{self.name}: {type(error).__name__}: {error}") from error
        self._sizes = {str(info["name"]): int(info["size"] or 0) for info in infos if info["type"] == "file"}
        if not sum(self._sizes.values()):
            raise TaskError(
                f"{self.name}: there is no file, or it is empty. Give a file or a pattern, such as *.jsonl."
            )
        if compressed := [file for file in self._sizes if file.endswith(_COMPRESSED)]:
            raise TaskError(
                f"{self.name}: {compressed[0]} is compressed, and cannot be read in parts. Decompress it, or write "
                "Parquet, which compresses its columns."
            )
        known = [
            [info["name"], info["size"], next((info[key] for key in _VERSIONS if key in info), None)] for info in infos
        ]
        self.digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
        self._row_groups = {file: self._count_row_groups(file) for file in self._sizes if file.endswith(".parquet")}

    @property
    def summary(self) -> str:
        """What is read, in a line."""
        size = sum(self._sizes.values())
        return f"{self.name}: {len(self._sizes)} files, {size:,} bytes, read and encoded as the training goes"

    def open(self, shard: int, num_shards: int, epoch: int, seed: int) -> DocumentReader:
        """See :class:`~paceline.data.stream.ShardedStream`."""
        blocks = self.blocks(num_shards)
        order = Permutation(len(blocks), derive_key(seed, _BLOCKS, epoch))(np.arange(len(blocks)))
        own = [(int(n), blocks[n]) for n in order[shard::num_shards]]
        return DocumentReader(self, own, len(blocks), epoch, seed)

    def blocks(self, num_shards: int) -> list[DocumentBlock]:
        lines = {file: size for file, size in self._sizes.items() if file not in self._row_groups}
        length = max(1, min(_BLOCK_BYTES, sum(lines.values()) // (_LEAST_BLOCKS * num_shards)))
        groups = [(file, n) for file, count in self._row_groups.items() for n in range(count)]
        # Each part of a row group reads all of it, so there are no more than shards need.
        parts = 1 if lines or not groups else -(-num_shards // len(groups))
        return [
            *(
                DocumentBlock(file, n, min(n + length, size))
                for file, size in lines.items()
                for n in range(0, size, length)
            ),
            *(DocumentBlock(*group, None, (part, parts)) for group in groups for part in range(parts)),
        ]

    @cached_property
    def first_documents(self) -> list[Encoded]:
        """Some documents with labels, from the beginning of the first file that has any.

        Raises:
            TaskError: none of the first files has one there.
        """
        for file in itertools.islice(sorted(file for file, size in self._sizes.items() if size), _FIRST_FILES):
            stop = None if file in self._row_groups else min(_FIRST_BYTES, self._sizes[file])
            block = DocumentBlock(file, 0, stop)
            if self._row_groups.get(file, 1) and (
                found := list(itertools.islice(self._encode(block), _FIRST_DOCUMENTS))
            ):
                return found
        raise TaskError(
            f"{self.name}: none of the first documents has a token to learn. A chat needs an answer, a message with "
            '"role": "assistant", and it must begin within --context tokens.'
        )

    @property
    def mean_tokens(self) -> float:
        """Tokens of a sample without padding, on average over the first documents."""
        first = _EncodedBlock(self.first_documents)
        if self._pack is None:
            return float(first.lengths.mean())
        return self._pack * (1.0 if self._concat else PackedDocuments(first, self._pack, 0).fill)

    def begin(self, number: int, block: DocumentBlock, epoch: int, seed: int) -> Future[list[Sample]]:
        """Begin to read the samples of a block, in the order of an epoch."""
        future = Future[list[Sample]]()

        def read() -> None:
            try:
                future.set_result(self._samples(number, block, epoch, seed))
            except Exception as error:
                future.set_exception(error)

        Thread(target=read, daemon=True).start()
        return future

    def _samples(self, number: int, block: DocumentBlock, epoch: int, seed: int) -> list[Sample]:
        key = derive_key(seed, _SAMPLES, number, epoch)
        documents = _EncodedBlock(list(self._encode(block)))
        if not documents:
            return []
        if self._pack is None:
            return [(documents[n], 1) for n in _permuted(len(documents), key)]
        if self._concat:
            joined = _EncodedBlock([documents.documents[n] for n in _permuted(len(documents), key)])
            parts = ConcatenatedDocuments(joined, self._pack)
            return [(parts[n], parts.count_beginning(n)) for n in _permuted(len(parts), key)]
        packs = PackedDocuments(documents, self._pack, derive_key(seed, _PACKS, number))
        return [(packs.read(n, epoch), len(packs.numbers(n, epoch))) for n in _permuted(len(packs), key)]

    def _encode(self, block: DocumentBlock) -> Iterator[Encoded]:
        """Yield the documents of a block that have labels.

        Raises:
            DataError: the store fails, or a record is not a document for the model.
        """
        for where, record in self._records(block):
            try:
                with self._encoding:
                    pieces = self._encoder(parse_line(record) if isinstance(record, bytes) else record)
            except TaskError as error:
                raise DataError(f"{self.name}: {where}: {error}") from error
            largest = max((max(piece.tokens) for piece in pieces if piece.tokens), default=0)
            if largest >= self._vocabulary:
                raise DataError(
                    f"{self.name}: {where}: the tokenizer has token {largest}, and the model's vocabulary "
                    f"{self._vocabulary} tokens. Give a model and its own tokenizer."
                )
            if any(any(piece.labelled) for piece in pieces):
                yield from pieces

    def _records(self, block: DocumentBlock) -> Iterator[tuple[str, Mapping[str, Any] | bytes]]:
        try:
            if block.stop is None:
                with self._store.open(block.file, "rb") as file:
                    for number, row in itertools.islice(
                        enumerate(rows_of(file, block.start)), block.part[0], None, block.part[1]
                    ):
                        yield f"{block.file}, row group {block.start}, row {number}", row
                return
            position, content = self._read_lines(block)
        except DataError:
            raise
        except Exception as error:  # each store has its own
            raise DataError(f"{self.name}: {block.file} cannot be read: {type(error).__name__}: {error}") from error
        for line in content.split(b"\n"):
            if line.removeprefix(MARK).strip():
                yield f"{block.file}, the line at byte {position}", line
            position += len(line) + 1

    def _read_lines(self, block: DocumentBlock) -> tuple[int, bytes]:
        """Return the lines that begin in a block, and where the first of them begins."""
        assert block.stop is not None
        size, first = self._sizes[block.file], max(0, block.start - 1)
        content = self._read(block.file, first, block.stop)
        skipped = content.find(b"\n") + 1 if block.start else 0
        if block.start and not skipped:  # no line begins here
            return block.stop, b""
        end, more = block.stop, max(_LINE_BYTES, (block.stop - block.start) // 16)
        while end < size and not content.endswith(b"\n") and b"\n" not in content[block.stop - first :]:
            content += self._read(block.file, end, min(size, end + more))
            end, more = end + more, 2 * more
        if end > block.stop:
            content = content[: content.find(b"\n", block.stop - first) + 1 or len(content)]
        return first + skipped, content[skipped:]

    def _read(self, file: str, start: int, stop: int) -> bytes:
        content = bytes(self._store.cat_file(file, start=start, end=stop))
        if len(content) != stop - start:
            raise DataError(f"{self.name}: {file} has become shorter since the start: restore it, then resume.")
        return content

    def _count_row_groups(self, path: str) -> int:
        try:
            from pyarrow.parquet import ParquetFile

            with self._store.open(path, "rb") as file:
                return int(ParquetFile(file).num_row_groups)
        except ModuleNotFoundError as error:
            raise TaskError(f"{self.name}: Parquet needs pyarrow: pip install pyarrow") from error
        except Exception as error:  # each store has its own
            raise TaskError(f"{self.name}: {path} cannot be read as Parquet: {error}") from error


def _permuted(number: int, key: int) -> list[int]:
    order: list[int] = Permutation(number, key)(np.arange(number)).tolist()
    return order


class DocumentReader:
    """Reads the blocks of a shard, in their order; the next one is read meanwhile.

    Args:
        count: blocks of all shards.
    """

    def __init__(
        self, stream: DocumentStream, blocks: list[tuple[int, DocumentBlock]], count: int, epoch: int, seed: int
    ) -> None:
        self._stream = stream
        self._blocks = blocks
        self._count = count
        self._epoch = epoch
        self._seed = seed
        self._block = 0
        self._sample = 0
        self._documents = 0
        self._samples: list[Sample] | None = None
        self._next: Future[list[Sample]] | None = None

    def __next__(self) -> dict[str, torch.Tensor]:
        while True:
            if self._samples is None:
                reading = self._next or self._begin(self._block)
                if reading is None:
                    raise StopIteration
                self._next = self._begin(self._block + 1)
                self._samples = reading.result()
            if self._sample < len(self._samples):
                sample, documents = self._samples[self._sample]
                self._sample += 1
                self._documents += documents
                return sample
            self._block += 1
            self._sample = 0
            self._samples = None

    def state_dict(self) -> dict[str, Any]:
        return {"block": self._block, "sample": self._sample, "units": self._documents, "blocks": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position.

        Raises:
            DataError: it counts other blocks.
        """
        parts = self._blocks[0][1].part[1] if self._blocks else 1
        saved = state.get("blocks", self._count // parts)  # earlier versions did not divide row groups
        if saved != self._count:
            raise DataError(
                f"{self._stream.name}: the run was saved by a version of Paceline that divides these files into "
                f"{saved} blocks, and this one makes {self._count}. Resume with that version, or start a new run."
            )
        self._block = state["block"]
        self._sample = state["sample"]
        self._documents = state.get("units", 0)

    def _begin(self, place: int) -> Future[list[Sample]] | None:
        if place >= len(self._blocks):
            return None
        return self._stream.begin(*self._blocks[place], self._epoch, self._seed)
