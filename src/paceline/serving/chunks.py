"""Predictions of large files, chunk by chunk, that can be killed and gone on with.

A chunk's outputs are one file, written whole and renamed into place, in a directory beside the result. Who
goes on computes the chunks that are missing; each row is in one chunk, so each is in the result once. The
result itself appears whole, when all are there, and the directory goes.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import ConfigError
from paceline.run_directory import fsync_directory, write_atomically
from paceline.serving.servable import Array, Arrays, ModelSpec, rows_of

FORMATS = (".npz", ".jsonl", ".csv")


class Journal:
    """Which chunks of a job are done.

    Attributes:
        chunks: (first row, row after the last) of each.
        done: the numbers of those that were found complete when this was opened.
    """

    def __init__(self, output: Path, job: Mapping[str, Any], rows: int, chunk_rows: int) -> None:
        self._output = output
        self._directory = output.with_name(output.name + ".parts")
        self._job = {**job, "rows": rows, "chunk_rows": chunk_rows}
        self.chunks = [(start, min(start + chunk_rows, rows)) for start in range(0, rows, chunk_rows)]
        self.done: frozenset[int] = frozenset()

    @classmethod
    @contextmanager
    def open(cls, output: Path, job: Mapping[str, Any], rows: int, chunk_rows: int) -> Iterator[Journal]:
        """Begin a job, or go on with it; nobody else can meanwhile.

        Raises:
            ConfigError: the output cannot be written, is there already, or another job's parts are.
        """
        if output.suffix not in FORMATS:
            raise ConfigError(f"--output ends in one of {', '.join(FORMATS)}, but is {output}.")
        if output.exists():
            raise ConfigError(f"--output {output} is there already. Remove it, or name another.")
        if not output.absolute().parent.is_dir():
            raise ConfigError(f"--output: there is no directory {output.absolute().parent}.")
        journal = cls(output, job, rows, chunk_rows)
        journal._directory.mkdir(exist_ok=True)
        descriptor = os.open(journal._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another process predicts into {output}.") from None
            journal._begin()
            yield journal
        finally:
            os.close(descriptor)

    def _begin(self) -> None:
        text = json.dumps(self._job, sort_keys=True).encode()
        record = self._directory / "job.json"
        if not record.exists():
            write_atomically(record, text)
        elif record.read_bytes() != text:
            raise ConfigError(
                f"{self._directory} holds parts of another prediction (other rows, model or options). "
                f"Repeat that one, or remove it: rm -r {self._directory}"
            )
        self.done = frozenset(number for number in range(len(self.chunks)) if self._is_whole(number))

    def _part(self, number: int) -> Path:
        return self._directory / f"part-{number:08d}.npz"

    def _is_whole(self, number: int) -> bool:
        start, stop = self.chunks[number]
        with suppress(OSError, ValueError, zipfile.BadZipFile):
            return rows_of(self._load(number)) == stop - start
        return False

    def _load(self, number: int) -> dict[str, Array]:
        with np.load(self._part(number), allow_pickle=False) as part:
            return {name: part[name] for name in part.files}

    def write(self, number: int, outputs: Arrays) -> None:
        """Keep a chunk's outputs."""
        stream = io.BytesIO()
        np.savez(stream, allow_pickle=False, **dict(outputs))
        write_atomically(self._part(number), stream.getvalue())

    def finish(self, spec: ModelSpec, names: Sequence[str]) -> None:
        """Write the result from all parts, and remove these."""
        parts = (self._load(number) for number in range(len(self.chunks)))
        draft = self._directory / f"result{self._output.suffix}"
        _WRITERS[self._output.suffix](draft, parts, spec, names)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.rename(self._output)
        fsync_directory(self._output.absolute().parent)
        shutil.rmtree(self._directory)


def fingerprint(arrays: Arrays) -> str:
    """SHA-256 of arrays' names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        for start in range(0, len(array), 4096):
            digest.update(np.ascontiguousarray(array[start : start + 4096]).data)
    return digest.hexdigest()


def records(outputs: Arrays, spec: ModelSpec, names: Sequence[str], first: int) -> Iterator[dict[str, Any]]:
    """Each row for people: its name, the most likely label and its probability, and all outputs."""
    for i in range(rows_of(outputs)):
        record: dict[str, Any] = {"row": first + i, "source": names[first + i]}
        if spec.label is not None and spec.label in outputs:
            number = int(outputs[spec.label][i])
            record["label"] = spec.labels[number] if number < len(spec.labels) else number
            if spec.probabilities is not None and spec.probabilities in outputs:
                record["probability"] = float(outputs[spec.probabilities][i][number])
        record["outputs"] = {name: array[i].tolist() for name, array in outputs.items()}
        yield record


def _write_npz(path: Path, parts: Iterator[Arrays], spec: ModelSpec, names: Sequence[str]) -> None:
    whole = list(parts)
    np.savez(
        path,
        allow_pickle=False,
        **{name: np.concatenate([part[name] for part in whole]) for name in whole[0]},
    )


def _write_jsonl(path: Path, parts: Iterator[Arrays], spec: ModelSpec, names: Sequence[str]) -> None:
    first = 0
    with path.open("w", encoding="utf-8") as file:
        for part in parts:
            file.writelines(json.dumps(record) + "\n" for record in records(part, spec, names, first))
            first += rows_of(part)


def _write_csv(path: Path, parts: Iterator[Arrays], spec: ModelSpec, names: Sequence[str]) -> None:
    first = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        for part in parts:
            for record in records(part, spec, names, first):
                flat = {key: value for key, value in record.items() if key != "outputs"}
                for name, value in record["outputs"].items():
                    if name == spec.label and spec.labels:
                        continue  # the label's name is there
                    cells = np.ravel(value).tolist()
                    headings = [name] if np.ndim(value) == 0 else _headings(name, len(cells), spec)
                    flat.update(zip(headings, cells, strict=True))
                if record["row"] == 0:
                    writer.writerow(flat)
                writer.writerow(flat.values())
            first += rows_of(part)


def _headings(name: str, count: int, spec: ModelSpec) -> list[str]:
    if name == spec.probabilities and len(spec.labels) == count:
        return list(spec.labels)
    return [f"{name}[{i}]" for i in range(count)]


_WRITERS: dict[str, Callable[[Path, Iterator[Arrays], ModelSpec, Sequence[str]], None]] = {
    ".npz": _write_npz,
    ".jsonl": _write_jsonl,
    ".csv": _write_csv,
}
