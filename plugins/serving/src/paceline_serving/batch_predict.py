"""Batch prediction of large files, in chunks that survive a restart."""

from __future__ import annotations

import asyncio
import csv
import errno
import hashlib
import io
import json
import math
import os
import secrets
import shutil
import sys
import zipfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.errors import ConfigError, DataError, ServingError
from paceline.core.files import fsync_directory, rename, write_atomically
from paceline.core.inference import TensorSpec
from paceline.core.ownership import locked
from paceline.core.plugins import import_library
from paceline_serving.batching import LocalDeployment, RequestFailure
from paceline_serving.client import Client
from paceline_serving.model import (
    Array,
    Arrays,
    ModelSpec,
    ServedModel,
    ServingOptions,
    describe_sizes,
    fits_shape,
    rows_of,
)
from paceline_serving.replica_process import ReplicaStarter
from paceline_serving.tables import (
    FORMATS,
    SUFFIXES,
    CellError,
    Rows,
    Table,
    columns_of,
    convert_cells,
    csv_rows,
    describe_not_utf8,
    encode_texts,
    is_table_of,
    kind_of,
    load_json,
    read_heading,
    read_table,
    records_of,
    text_array,
    to_dtype,
    to_inputs,
    write,
)

# --- Input rows from files: tables, pictures, arrays, CSV and JSON ---


_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_COMPRESSED = {".gz": "zcat", ".zst": "zstdcat", ".xz": "xzcat", ".bz2": "bzcat"}
_CHANNELS = {1: "L", 3: "RGB", 4: "RGBA"}


def read_rows(paths: Sequence[Path], spec: ModelSpec) -> Rows:
    """Read files, concatenate their rows, and check them against the model's inputs.

    ``-`` is a table on standard input.

    Raises:
        DataError: a file cannot be read, or does not match the inputs; says what the model takes.
    """
    if not paths:
        raise ConfigError(
            "there are no input files. Give images, .npy, .npz or .json files, or tables: .csv, .parquet, .jsonl, or - "
            "for a table on standard input."
        )
    parts = [_read_as_table(path, spec) or _read_arrays(path, spec) for path in paths]
    if len(parts) == 1:
        return parts[0]
    arrays = {name: [part.arrays[name] for part in parts] for name in spec.inputs}
    for name, several in arrays.items():
        if len({array.shape[1:] for array in several}) > 1:
            raise DataError(f"the files have rows of {name} of different sizes. Predict them one after the other.")
    columns = [part.other_columns for part in parts if part.other_columns is not None]
    if len(columns) not in (0, len(parts)) or any(other.keys() != columns[0].keys() for other in columns):
        raise DataError("the files do not have the same columns. Predict them one after the other.")
    return Rows(
        {name: np.concatenate(several) for name, several in arrays.items()},
        [name for part in parts for name in part.names],
        {name: [cell for other in columns for cell in other[name]] for name in columns[0]} if columns else None,
        parts[0].suffix,
    )


def _read_as_table(path: Path, spec: ModelSpec) -> Rows | None:
    """Read a table with a column for each input; None if the file is of another kind."""
    suffix = path.suffix.lower()
    try:
        if str(path) == "-":
            content = sys.stdin.buffer.read()
            suffix, source = kind_of(content), "standard input"
            table = read_table(source, io.BytesIO(content), suffix)
        elif suffix in SUFFIXES:
            source = str(path)
            with path.open("rb") as file:
                if suffix == ".csv" and _is_nameless(read_heading(file), spec):
                    return None
                table = read_table(source, file, suffix)
        elif suffix == ".json" and (records := records_of(_read_json(path))) is not None:
            source, table = str(path), Table(columns_of(records))
        else:
            return None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    try:
        arrays, used = to_inputs(table.columns, spec, is_text=suffix == ".csv")
    except CellError as error:
        where = "" if error.row is None else f", {table.locate(error.row)}"
        raise DataError(f"{source}{where}, column {error.column}: {error.problem}.") from None
    if rows_of(arrays) == 0:
        raise DataError(f"{source} has no rows.")
    others = {name: cells for name, cells in table.columns.items() if name not in used}
    written = ".jsonl" if suffix == ".json" else suffix
    return Rows(arrays, [table.locate(row) for row in range(rows_of(arrays))], others, written)


def _is_nameless(heading: Sequence[str], spec: ModelSpec) -> bool:
    """Return whether a CSV holds the numbers of the only input without its name."""
    if len(spec.inputs) != 1 or is_table_of(heading, spec):
        return False
    [tensor] = spec.inputs.values()
    # Columns that are named otherwise may be other columns.
    return tensor.dtype != "str" and not (tensor.columns and _is_heading(heading))


def _read_arrays(path: Path, spec: ModelSpec) -> Rows:
    kind = path.suffix.lower()
    try:
        if kind in _PICTURES:
            raw: Any = {_only_input(spec, path): _picture(path, spec)}
        elif kind == ".npy":
            raw = {_only_input(spec, path): _array(path)}
        elif kind == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                raw = {name: archive[name] for name in archive.files}
        elif kind == ".csv":
            name = _only_input(spec, path)
            raw = {name: _csv(path, spec.inputs[name])}
        elif kind == ".json":
            document = _read_json(path)
            raw = document if isinstance(document, dict) else {_only_input(spec, path): document}
        else:
            known = ", ".join((*_PICTURES, ".npy", ".npz", ".json", *SUFFIXES))
            if kind in _COMPRESSED:
                raise DataError(
                    f"{path} is compressed. Unpack it: {_COMPRESSED[kind]} {path} | paceline predict MODEL - --output "
                    "OUTPUT"
                )
            raise DataError(
                f"{path}: the file type {kind or 'without an extension'} is not supported. Supported are: {known}."
            )
    except UnicodeDecodeError as error:
        raise DataError(describe_not_utf8(str(path), error)) from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    arrays = _conform(path, raw, spec)
    count = rows_of(arrays)
    return Rows(arrays, [path.name] if count == 1 else [f"{path.name}[{i}]" for i in range(count)])


def _array(path: Path) -> Array:
    """Map a ``.npy``, or read it whole where the file system maps no files."""
    array: Array
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        array = np.load(path, allow_pickle=False)
    return array


def _read_json(path: Path) -> Any:
    try:
        return load_json(path.read_bytes())
    except UnicodeDecodeError as error:
        raise DataError(describe_not_utf8(str(path), error)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _only_input(spec: ModelSpec, path: Path) -> str:
    if len(spec.inputs) != 1:
        raise DataError(
            f"{path}: {spec.name} has several inputs ({', '.join(spec.inputs)}). Give a table with these columns, or "
            "name them in a .npz or a JSON object."
        )
    return next(iter(spec.inputs))


def _picture(path: Path, spec: ModelSpec) -> Array:
    """Read a picture as the model's only input: (1, C, H, W), (1, H, W, C) or (1, H, W), uint8."""
    image_library = import_library("PIL.Image", f"{path}: a picture", "pip install pillow")
    tensor = spec.inputs[_only_input(spec, path)]
    shape = tensor.shape
    channels_first = len(shape) == 3 and shape[0] in _CHANNELS
    sizes = shape[1:] if channels_first else shape[:2]
    channels = 1 if len(shape) == 2 else shape[0] if channels_first else shape[-1]
    if tensor.dtype != "uint8" or len(shape) not in (2, 3) or channels not in _CHANNELS:
        raise DataError(f"{path}: {spec.name} takes {_describe(tensor)}, which is not a picture.")
    with image_library.open(path) as picture:
        height, width = (
            expected if expected is not None else actual
            for expected, actual in zip(sizes, picture.size[::-1], strict=True)
        )
        converted = picture.convert(_CHANNELS[channels]).resize((width, height))
    pixels = np.asarray(converted, np.uint8).reshape(height, width, channels)
    if channels_first:
        pixels = pixels.transpose(2, 0, 1)
    return np.ascontiguousarray(pixels[..., 0] if len(shape) == 2 else pixels)[np.newaxis]


def _csv(path: Path, tensor: TensorSpec) -> Array:
    """Read a CSV without the input's name: a column for each element of the tensor."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        first = next(reader, [])
        rows = [] if _is_heading(first) else [(reader.line_num, first)]
        rows += csv_rows(reader, len(first))
    for line, row in rows:
        if len(row) != len(first):
            raise ValueError(f"line {line} has {len(row)} cells, but the first one has {len(first)}.")
    element = replace(tensor, shape=(), columns={})
    columns = []
    for number in range(len(first)):
        try:
            columns.append(convert_cells(f"column {number + 1}", [row[number] for _, row in rows], element, True))
        except CellError as error:
            raise ValueError(f"line {rows[error.row or 0][0]}, {error}.") from None
    return np.stack(columns, axis=1) if columns else np.empty((0, 0), tensor.dtype)


def _is_heading(row: Sequence[str]) -> bool:
    """Return whether a CSV's first row holds names: no cell is empty, or like a number in whatever digits."""

    def is_like_number(cell: str) -> bool:
        try:
            float(cell)
        except ValueError:
            return not cell.strip()
        return True

    return bool(row) and not any(map(is_like_number, row))


def _conform(path: Path, raw: Mapping[str, Any], spec: ModelSpec) -> dict[str, Array]:
    """Convert arrays to the types and shapes of the model's inputs, reshaping flat rows."""
    if raw.keys() != spec.inputs.keys():
        raise DataError(
            f"{path} contains {', '.join(raw) or 'nothing'}, but {spec.name} takes {', '.join(spec.inputs)}."
        )
    arrays = {}
    try:
        for name, tensor in spec.inputs.items():
            arrays[name] = _fit(path, name, np.asanyarray(raw[name]), tensor)
        if len({len(array) for array in arrays.values()}) != 1:
            raise DataError(f"{path}: its arrays have different numbers of rows.")
        if rows_of(arrays) == 0:
            raise DataError(f"{path} has no rows.")
        return encode_texts(arrays, spec)
    except CellError as error:
        where = "" if error.row is None else f", row {error.row + 1}"
        raise DataError(f"{path}{where}: {error.column} {error.problem}.") from None


def _fit(path: Path, name: str, array: Array, tensor: TensorSpec) -> Array:
    if tensor.dtype == "str":
        if array.dtype.kind != "U" or array.ndim != 1 + len(tensor.shape) or array.shape[1:] != tensor.shape:
            raise DataError(f"{path}: {name} must be {_describe(tensor)}, but is {array.dtype} of {array.shape}.")
        return text_array(array.ravel().tolist(), array.shape)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{path}: {name} must contain only numbers, in rows of equal length.")
    sizes = tensor.shape
    if array.ndim == 2 and None not in sizes and array.shape[1] == math.prod(size or 0 for size in sizes):
        array = array.reshape(len(array), *(size for size in sizes if size is not None))
    if not fits_shape(array.shape, (None, *sizes)):
        raise DataError(f"{path}: {name} must be {_describe(tensor)}, but has the shape {array.shape}.")
    return to_dtype(name, array, tensor)


def _describe(tensor: TensorSpec) -> str:
    sizes = describe_sizes(tensor.shape)
    kind = "texts" if tensor.dtype == "str" else tensor.dtype
    return f"{kind} of (rows, {sizes})" if sizes else f"{kind} of (rows,)"


# --- Predictions in chunks, which continue after a kill ---
#
# A chunk's outputs are one file, written whole and renamed into place, in a directory next to the result. A
# restart computes the missing chunks; each row is in one chunk, so it is in the result once. The result appears
# whole once all chunks exist, and then the directory is removed.


class PredictionStore:
    """The finished chunks of a job.

    Attributes:
        chunks: (first row, row after the last) of each.
        done: numbers of the chunks that were complete when the store was opened.
    """

    def __init__(self, output: Path, job: Mapping[str, Any], rows: int, chunk_rows: int) -> None:
        self._output = output
        self._directory = output.with_name(output.name + ".parts")
        self._job = {**job, "rows": rows, "chunk_rows": chunk_rows}
        self.chunks = [(start, min(start + chunk_rows, rows)) for start in range(0, rows, chunk_rows)]
        self.done: frozenset[int] = frozenset()

    @classmethod
    @contextmanager
    def open(cls, output: Path, job: Mapping[str, Any], rows: int, chunk_rows: int) -> Iterator[PredictionStore]:
        """Start or continue a job, with exclusive access.

        Raises:
            ConfigError: the output exists, or the directory holds parts of another job.
            DataError: it cannot be written.
        """
        if output.suffix not in FORMATS:
            raise ConfigError(f"--output must end in one of {', '.join(FORMATS)}, but is {output}.")
        if not output.absolute().parent.is_dir():
            raise ConfigError(f"--output {output}: the directory {output.absolute().parent} does not exist.")
        store = cls(output, job, rows, chunk_rows)
        store._require_new()
        with ExitStack() as stack:
            with store._explain_errors():
                store._directory.mkdir(exist_ok=True)
                try:
                    stack.enter_context(locked(store._directory / "lock", wait=False))
                    store._require_new()
                    store._load_job()
                except BlockingIOError:
                    raise ConfigError(f"another process is writing predictions into {output}.") from None
                except FileNotFoundError:
                    store._require_new()  # another process has finished meanwhile, and removed the directory
                    raise
            yield store
        with suppress(OSError):  # it holds parts, or is gone; NFS keeps it until the lock's file is closed
            store._directory.rmdir()

    def _require_new(self) -> None:
        if self._output.exists():
            raise ConfigError(f"--output {self._output} already exists. Remove it, or choose another file.")

    def _load_job(self) -> None:
        text = json.dumps(self._job, sort_keys=True).encode()
        record = self._directory / "job.json"
        if not record.exists():
            write_atomically(record, text)
        elif record.read_bytes() != text:
            raise ConfigError(
                f"{self._directory} holds parts of another prediction (other rows, model or options). "
                f"Repeat that prediction, or remove its parts: rm -r {self._directory}"
            )
        self.done = frozenset(number for number in range(len(self.chunks)) if self._is_whole(number))

    def _part(self, number: int) -> Path:
        return self._directory / f"part-{number:08d}.npz"

    def _is_whole(self, number: int) -> bool:
        with suppress(OSError):
            self._load(number)
            return True
        return False

    def _load(self, number: int) -> dict[str, Array]:
        """Read a chunk's outputs; an OSError says that they are missing or damaged."""
        start, stop = self.chunks[number]
        with suppress(ValueError, zipfile.BadZipFile), np.load(self._part(number), allow_pickle=False) as part:
            outputs = {name: part[name] for name in part.files}
            if rows_of(outputs) == stop - start:
                return outputs
        raise OSError(errno.EIO, f"{self._part(number).name} is damaged", str(self._part(number)))

    def write(self, number: int, outputs: Arrays) -> None:
        """Store a chunk's outputs."""
        stream = io.BytesIO()
        np.savez(stream, allow_pickle=False, **dict(outputs))
        with self._explain_errors():
            write_atomically(self._part(number), stream.getvalue())

    def finish(self, spec: ModelSpec, rows: Rows) -> None:
        """Write the result from all parts, and remove the parts."""
        parts = (self._load(number) for number in range(len(self.chunks)))
        draft = self._directory / f"result-{secrets.token_hex(4)}{self._output.suffix}"
        with self._explain_errors():
            with draft.open("wb") as file:
                write(file, self._output.suffix, parts, spec, rows)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            if draft.stat().st_size != size:
                raise OSError(errno.EIO, "another program has changed it", str(draft))
            rename(draft, self._output)
            fsync_directory(self._output.absolute().parent)
            shutil.rmtree(self._directory, ignore_errors=True)

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            kept = f" Predicted rows stay in {self._directory}." if self._directory.exists() else ""
            raise DataError(
                f"--output {self._output} cannot be written: {error.strerror or error}.{kept} Free some space or "
                "change the permissions, then repeat the command."
            ) from error


def fingerprint(arrays: Arrays) -> str:
    """Return the SHA-256 of arrays' names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        for start in range(0, len(array), 4096):
            piece = array[start : start + 4096]
            is_text = array.dtype == object
            digest.update(json.dumps(piece.tolist()).encode() if is_text else np.ascontiguousarray(piece).data)
    return digest.hexdigest()


# --- Prediction engines: replicas on this machine, or a server ---


Predict = Callable[[Arrays], Awaitable[dict[str, Array]]]
PredictionEngine = AbstractAsyncContextManager[Predict]
OnRows = Callable[[int, int], None]
"""Receives the progress: rows predicted, and rows in total."""


@asynccontextmanager
async def replicas(model: ServedModel, options: ServingOptions) -> AsyncIterator[Predict]:
    """Run replicas of a package."""
    starter = ReplicaStarter(options.threads)
    deployment = LocalDeployment(starter, model, options)

    async def predict(inputs: Arrays) -> dict[str, Array]:
        try:
            return await deployment.batcher.submit(inputs)
        except RequestFailure as failure:
            raise ServingError(str(failure)) from failure

    try:
        await deployment.start()
        yield predict
    finally:
        await deployment.close()
        starter.close()


@asynccontextmanager
async def server(url: str, model: str, token_file: Path | None, connections: int) -> AsyncIterator[Predict]:
    """Use a server through ``connections`` connections."""
    free: asyncio.Queue[Client] = asyncio.Queue()

    async def predict(inputs: Arrays) -> dict[str, Array]:
        client = await free.get()
        try:
            return await asyncio.to_thread(client.infer, model, inputs)
        finally:
            free.put_nowait(client)

    with ExitStack() as stack:
        for _ in range(connections):
            free.put_nowait(stack.enter_context(Client(url, token_file=token_file)))
        yield predict


async def predict_into(
    store: PredictionStore, arrays: Arrays, engine: PredictionEngine, concurrency: int, on_rows: OnRows
) -> None:
    """Compute the missing chunks of a job, several concurrently."""
    done, total = sum(store.chunks[number][1] - store.chunks[number][0] for number in store.done), rows_of(arrays)
    on_rows(done, total)
    missing = iter([n for n in range(len(store.chunks)) if n not in store.done])

    async def predict_chunks(predict: Predict) -> None:
        nonlocal done
        for number in missing:
            start, stop = store.chunks[number]
            store.write(number, await predict(_piece(arrays, start, stop)))
            done += stop - start
            on_rows(done, total)

    async with engine as predict, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(predict_chunks(predict))


def _piece(arrays: Arrays, start: int, stop: int) -> Arrays:
    return {name: np.ascontiguousarray(array[start:stop]) for name, array in arrays.items()}


async def predict_all(arrays: Arrays, engine: PredictionEngine, chunk_rows: int, on_rows: OnRows) -> dict[str, Array]:
    """Predict all rows and return the outputs, without storing chunks."""
    answers, total = [], rows_of(arrays)
    on_rows(0, total)
    async with engine as predict:
        for start in range(0, total, chunk_rows):
            answers.append(await predict(_piece(arrays, start, start + chunk_rows)))
            on_rows(min(start + chunk_rows, total), total)
    return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}
