"""Sharded checkpoints: each process writes its parts of the tensors into a file of its own, and reads those it needs.

The table ``shards.json`` has, for each tensor, its slices: the file, the place in the tensor and in the file, and the
SHA-256. So another number of processes reads its parts by name and offset, and verifies what it reads.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError
from paceline.core.files import look_anew, write_atomically
from paceline.runs.checkpoint_manifest import (
    Buffer,
    FileRecord,
    canonical_json,
    parse_json,
    read_range,
    remove,
    write_file,
)
from paceline.runs.checkpoint_state import TORCH_DTYPES, TensorShard

TABLE = "shards.json"
FORMAT = 3
"""The format of sharded checkpoints, which versions without this module refuse."""

_PREFIX = "rank-"
_PATIENCE_S = {False: 120.0, True: 10.0}  # for a file that does not grow: in the group, and after its end
_LOOK_EVERY_S = 0.02

# --- Writing ---


@dataclass(frozen=True)
class Writers:
    """The processes that write one checkpoint.

    Attributes:
        number: this process's; number 0 commits the checkpoint.
        count: of all.
        draft: the directory in which they write.
        parted: set once they are no longer in one group, so that one of them may be gone.
    """

    number: int
    count: int
    draft: Path
    parted: threading.Event

    @property
    def file(self) -> str:
        """The name of this process's file."""
        return self._file(self.number)

    def _file(self, number: int) -> str:
        return f"{_PREFIX}{number:05d}-of-{self.count:05d}.safetensors"

    def _note(self, number: int) -> Path:
        return self.draft / f".{self._file(number)}.json"

    def write(self, header: bytes, data: Iterable[Buffer], shards: Mapping[str, TensorShard]) -> None:
        """Write this process's file, and a note about it for number 0.

        Args:
            header, data: of the file, as safetensors has them; each buffer has whole tensors.
            shards: what it holds, by name.

        Raises:
            OSError: the disk is full or broken; number 0 finds that in the note.
        """
        entries = json.loads(header[8:])
        sizes = iter([stop - start for start, stop in (entry["data_offsets"] for entry in entries.values())])
        hashes: list[str] = []

        def hash_each() -> Iterator[Buffer]:
            yield header
            for content in data:
                rest = memoryview(content)
                while rest:
                    size = next(sizes)
                    hashes.append(hashlib.sha256(rest[:size]).hexdigest())
                    rest = rest[size:]
                yield content

        try:
            record = write_file(self.draft / self.file, hash_each())
            slices = {}
            for (name, entry), sha256 in zip(entries.items(), hashes, strict=True):
                shard = shards[name]
                slices[name] = {
                    "dtype": entry["dtype"],
                    "shape": list(shard.shape),
                    "slices": [
                        {
                            "file": self.file,
                            "offset": list(shard.offset),
                            "size": entry["shape"],
                            "start": len(header) + entry["data_offsets"][0],
                            "sha256": sha256,
                        }
                    ],
                }
            note = {"record": asdict(record), "tensors": slices}
        except OSError as error:
            remove(self.draft / self.file)  # which leaves room for the note on a full disk
            write_atomically(self._note(self.number), json.dumps({"problem": str(error)}).encode())
            raise
        write_atomically(self._note(self.number), json.dumps(note).encode())

    def collect(self) -> dict[str, FileRecord]:
        """Wait for all files, and write the table; return the files.

        Raises:
            OSError: a process could not write its file, or is gone.
        """
        records: dict[str, FileRecord] = {}
        table: dict[str, Any] = {}
        for number in range(self.count):
            self._await(number)
            note = json.loads(self._note(number).read_bytes())
            remove(self._note(number))
            if "problem" in note:
                raise OSError(None, note["problem"])
            records[self._file(number)] = FileRecord(**note["record"])
            for name, entry in note["tensors"].items():
                table.setdefault(name, {**entry, "slices": []})["slices"] += entry["slices"]
        records[TABLE] = write_file(self.draft / TABLE, [canonical_json(table)])
        return records

    def _await(self, number: int) -> None:
        file, size, since = self.draft / self._file(number), -1, 0.0
        while not self._note(number).exists():
            now = file.stat().st_size if file.exists() else 0
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > _PATIENCE_S[self.parted.is_set()]:
                raise OSError(None, f"the process that writes {file.name} is gone, or cannot write")
            look_anew(self.draft)
            time.sleep(_LOOK_EVERY_S)


# --- Reading ---


def is_shard_file(name: str) -> bool:
    """Return whether a file of a checkpoint holds the parts of one process."""
    return name.startswith(_PREFIX)


@dataclass(frozen=True)
class _Slice:
    """A part of a tensor in a file: its place in the tensor, and its first byte."""

    file: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int
    sha256: str

    def read(self, checkpoint: Path, dtype: torch.dtype) -> Tensor:
        content = read_range(checkpoint, self.file, self.start, math.prod(self.size) * dtype.itemsize)
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise CheckpointError(f"checkpoint {checkpoint} is damaged: a slice in {self.file} has another SHA-256.")
        return torch.frombuffer(content, dtype=torch.uint8).view(dtype).view(self.size)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a sharded checkpoint that is still on the disk."""

    checkpoint: Path
    dtype: torch.dtype
    shape: torch.Size
    slices: tuple[_Slice, ...]

    def read(self, box: Sequence[slice] = ()) -> Tensor:
        """Read a part of it, by default all; the bytes used are the bytes verified.

        Raises:
            CheckpointError: it is damaged or gone.
        """
        wanted = [(place.start, place.stop) for place in box] or [(0, length) for length in self.shape]
        part = torch.empty([max(0, stop - start) for start, stop in wanted], dtype=self.dtype)
        filled = 0
        for piece in self.slices if part.numel() else ():
            there = [(first, first + length) for first, length in zip(piece.offset, piece.size, strict=True)]
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, there, strict=True)]
            if any(stop <= start for start, stop in both):
                continue
            content = piece.read(self.checkpoint, self.dtype)
            into = part[_within(both, wanted)]
            into.copy_(content[_within(both, there)])
            filled += into.numel()
        if filled != part.numel():
            raise CheckpointError(f"checkpoint {self.checkpoint} has not all parts of a tensor of {tuple(self.shape)}.")
        return part


def _within(box: Sequence[tuple[int, int]], outer: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))


def stored_tensors(checkpoint: Path, table: bytes) -> dict[str, dict[str, StoredTensor]]:
    """Return the sharded tensors of a checkpoint by part and name.

    Raises:
        CheckpointError: the table is malformed.
    """
    stored: dict[str, dict[str, StoredTensor]] = {}
    try:
        for name, entry in parse_json(table, TABLE).items():
            slices = tuple(
                _Slice(**{**piece, "offset": tuple(piece["offset"]), "size": tuple(piece["size"])})
                for piece in entry["slices"]
            )
            part, _, inner = name.partition("/")
            tensor = StoredTensor(checkpoint, TORCH_DTYPES[entry["dtype"]], torch.Size(entry["shape"]), slices)
            stored.setdefault(part, {})[inner] = tensor
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{TABLE} is malformed: {error}") from error
    return stored
