"""Tables: their files, their columns as a model's inputs, and predictions as records and files."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import IO, Any

import numpy as np

from paceline.core.errors import DataError
from paceline.core.inference import TensorSpec
from paceline.core.plugins import import_library
from paceline_serving.encodings import MAX_TEXT_LENGTH, EncodingError, compose
from paceline_serving.model import Array, Arrays, ModelSpec, describe_sizes, fits_shape, rows_of

# --- From columns to a model's inputs ---


class CellError(Exception):
    """A cell that the model does not take.

    Attributes:
        row: its number from 0; None if a whole column is wrong.
        problem: says what is wrong, without the place.
    """

    def __init__(self, row: int | None, column: str, problem: str) -> None:
        super().__init__(f"{column} {problem}")
        self.row = row
        self.column = column
        self.problem = problem


def is_table_of(columns: Sequence[str], spec: ModelSpec) -> bool:
    """Return whether these columns hold all inputs of a model."""
    spelled = list(_spelled(columns, spec))
    return all(_columns_of(name, tensor, spelled) for name, tensor in spec.inputs.items())


def _spelled(columns: Iterable[str], spec: ModelSpec) -> dict[str, str]:
    """Return each column's name by the model's spelling of it, if Unicode calls the two equal, or else by itself."""
    given = list(columns)
    names = {compose(each): each for name, tensor in spec.inputs.items() for each in tensor.columns or [name]}
    spelled = {names.get(compose(name), name): name for name in given}
    return {**spelled, **{name: name for name in given if name in spelled}}


def to_inputs(
    columns: Mapping[str, Sequence[Any]], spec: ModelSpec, *, is_text: bool = False
) -> tuple[dict[str, Array], list[str]]:
    """Convert columns to a model's inputs.

    An input has the columns that its schema names, or that of its own name. One of several elements has lists in that
    column, or a column for each element: ``name[0]``, ``name[1]``.

    Args:
        columns: their cells: numbers, lists and text, by name.
        is_text: whether numbers and lists are written as text, as in CSV.

    Returns:
        The inputs, texts as the numbers that the package's encodings give, and the names of the columns that they
        were made of.

    Raises:
        CellError: a column is missing, or the model does not take a cell.
    """
    arrays: dict[str, Array] = {}
    used: list[str] = []
    spelled = _spelled(columns, spec)
    columns = {name: columns[given] for name, given in spelled.items()}
    for name, tensor in spec.inputs.items():
        found = _columns_of(name, tensor, list(columns))
        if not found:
            missing = next((column for column in tensor.columns if column not in columns), name)
            raise CellError(None, missing, f"is missing; the columns are {', '.join(columns) or 'none'}")
        if found == [name] and not tensor.columns:
            arrays[name] = _convert_column(name, columns[name], tensor, is_text)
        else:
            element = replace(tensor, shape=(), columns={})
            arrays[name] = np.stack([convert_cells(one, columns[one], element, is_text) for one in found], axis=1)
        used += [spelled[one] for one in found]
    return encode_texts(arrays, spec), used


def to_record(spec: ModelSpec, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as a table's record: an input whose elements have names gets a value for each name."""
    record: dict[str, Any] = {}
    for name, value in row.items():
        columns = spec.inputs[name].columns
        record |= dict(zip(columns, value, strict=True)) if columns else {name: value}
    return record


def encode_texts(arrays: Arrays, spec: ModelSpec) -> dict[str, Array]:
    """Replace texts by the numbers that the package's encodings give.

    Raises:
        CellError: a text has none; names the row, and the column or input.
    """
    encoded = dict(arrays)
    for name, encoding in spec.encodings.items():
        texts = arrays[name]
        try:
            numbers = encoding.encode(texts.ravel().tolist())
        except EncodingError as error:
            row, element = divmod(error.index, texts.size // len(texts))
            columns = list(spec.inputs[name].columns)
            raise CellError(row, columns[element] if columns else name, error.problem) from None
        encoded[name] = numbers.reshape(*texts.shape, *encoding.shape)
    return encoded


def _columns_of(name: str, tensor: TensorSpec, columns: Sequence[str]) -> list[str]:
    elements = list(tensor.columns)
    if not elements:
        if name in columns:
            return [name]
        if len(tensor.shape) != 1:
            return []
        size = tensor.shape[0] or sum(column.startswith(f"{name}[") for column in columns)
        elements = [f"{name}[{number}]" for number in range(size)]
    return elements if set(elements) <= set(columns) else []


def _convert_column(column: str, cells: Sequence[Any], tensor: TensorSpec, is_text: bool) -> Array:
    if not tensor.shape:
        return convert_cells(column, cells, tensor, is_text)
    rows = [_convert_list(row, column, cell, tensor, is_text) for row, cell in enumerate(cells)]
    for number, row in enumerate(rows):
        if row.shape != rows[0].shape:
            problem = f"has the shape {list(row.shape)}, and the first row {list(rows[0].shape)}; rows must be alike"
            raise CellError(number, column, problem)
    return np.stack(rows)


def _convert_list(row: int, column: str, cell: Any, tensor: TensorSpec, is_text: bool) -> Array:
    expected = f"[{describe_sizes(tensor.shape)}]"
    try:
        values = np.asarray(load_json(cell) if is_text else cell, dtype=object)
    except (ValueError, RecursionError):
        raise CellError(row, column, f"must be a list of the shape {expected}, but is {_show(cell, is_text)}") from None
    if not fits_shape(values.shape, tensor.shape) or values.size == 0:
        raise CellError(row, column, f"must be a list of the shape {expected}, but is {_show(cell, is_text)}")
    if tensor.max_size is not None and max(values.shape) > tensor.max_size:
        raise CellError(row, column, f"has more than {tensor.max_size} elements, the model's most")
    try:
        return convert_cells(column, values.ravel().tolist(), tensor, False).reshape(values.shape)
    except CellError as error:
        raise CellError(row, column, error.problem) from None


def convert_cells(column: str, cells: Sequence[Any], tensor: TensorSpec, is_text: bool) -> Array:
    """Convert cells to numbers of the input's dtype and range, or to texts."""
    if tensor.dtype == "str":
        return text_array([_parse_text(row, column, cell, tensor) for row, cell in enumerate(cells)], (len(cells),))
    dtype = np.dtype(tensor.dtype)
    parse: Callable[[Any], Any] = {"b": _parse_bool, "f": _parse_float}.get(dtype.kind, _parse_int)
    missing = ("" if is_text else None) if tensor.allow_missing else _NEVER
    numbers = []
    for row, cell in enumerate(cells):
        if cell == missing:
            numbers.append(math.nan)
            continue
        try:
            if is_text is not isinstance(cell, str):
                raise TypeError
            numbers.append(parse(cell))
        except (ValueError, TypeError, OverflowError) as error:
            kind = {"b": "true or false", "f": "a number"}.get(dtype.kind, "a whole number")
            what = "is empty" if cell in (None, "") else f"is {_show(cell, is_text)}"
            reason = f" ({error})" if isinstance(error, OverflowError | _OutOfRange) else ""
            raise CellError(row, column, f"must be {kind}, but {what}{reason}") from None
    if dtype.kind == "b":
        return np.asarray(numbers, dtype)
    limits: Any = np.iinfo(dtype) if dtype.kind in "iu" else np.finfo(dtype)
    # Python's numbers: numpy would round the others to float32 for a comparison.
    lowest, highest = (float(n) if dtype.kind == "f" else int(n) for n in (limits.min, limits.max))
    least = max(lowest, -math.inf if tensor.minimum is None else tensor.minimum)
    most = min(highest, math.inf if tensor.maximum is None else tensor.maximum)
    is_open = dtype.kind == "f" and tensor.minimum is None and tensor.maximum is None
    for row, number in enumerate(numbers):
        is_missing = math.isnan(number)
        if is_missing and not tensor.allow_missing:
            raise CellError(row, column, f"{MISSING}, but is {_show(cells[row], is_text)}")
        if not (least <= number <= most or is_missing or (is_open and not math.isfinite(number))):
            raise CellError(row, column, f"must be between {least:g} and {most:g}, but is {number!r:.80}")
    return np.asarray(numbers, dtype)


def to_dtype(name: str, numbers: Array, tensor: TensorSpec) -> Array:
    """Convert numbers to the dtype of an input, if it and the input's range hold every one of them.

    Raises:
        CellError: one does not fit; names the row of a missing one.
    """
    dtype = np.dtype(tensor.dtype)
    array = numbers
    if numbers.dtype != dtype:
        if dtype.kind == "b" and not ((numbers == 0) | (numbers == 1)).all():
            raise CellError(None, name, "must be true or false")
        if dtype.kind in "iu":
            _check_whole(name, numbers, np.iinfo(dtype))
        with np.errstate(over="ignore"):
            array = numbers.astype(dtype)
    if dtype.kind == "f" and not (is_finite := np.isfinite(array)).all():
        if (np.isfinite(numbers) & ~is_finite).any():
            raise CellError(None, name, f"must be within the range of {tensor.dtype}, but has a number beyond it")
        if not tensor.allow_missing and (is_missing := np.isnan(array)).any():
            row = int(np.argmax(is_missing.reshape(len(array), -1).any(axis=1)))
            raise CellError(row, name, f"{MISSING}, but has a NaN")
    is_low = tensor.minimum is not None and (array < tensor.minimum).any()
    if is_low or (tensor.maximum is not None and (array > tensor.maximum).any()):
        least, most = tensor.minimum, tensor.maximum
        both = f"between {least} and {most}"
        limits = f"at most {most}" if least is None else f"at least {least}" if most is None else both
        raise CellError(None, name, f"must be {limits}")
    return array


def _check_whole(name: str, numbers: Array, limits: np.iinfo[Any]) -> None:
    is_float = numbers.dtype.kind == "f"
    if is_float and not (np.isfinite(numbers) & (numbers == np.trunc(numbers))).all():
        raise CellError(None, name, "must be whole numbers")
    least, most = (int(numbers.min()), int(numbers.max())) if numbers.size else (0, 0)
    if least < limits.min or most > limits.max:
        raise CellError(None, name, f"must be between {limits.min} and {limits.max}")
    if is_float and max(-least, most) >= EXACT_FLOATS:
        raise CellError(None, name, "must have all its digits: floats from 2**53 on may be other whole numbers")


def _parse_text(row: int, column: str, cell: Any, tensor: TensorSpec) -> str:
    """Return a text; a category may also be a whole number, a date that of Parquet, and a missing one is empty."""
    if cell is None and tensor.allow_missing:
        return ""
    text = str(cell) if type(cell) is int or isinstance(cell, date) else cell
    if not isinstance(text, str):
        what = "is missing" if cell is None else f"is {_show(cell, False)}"
        raise CellError(row, column, f"must be a text, but {what}")
    check_length(row, column, text)
    return text


def _show(cell: Any, is_text: bool) -> str:
    """Return a cell for a message: in the words of CSV if ``is_text``, else of JSON."""
    if isinstance(cell, str):
        return f"{'' if is_text else 'the text '}{cell!r:.80}"
    return f"{json.dumps(cell, default=str, ensure_ascii=False):.80}"


def check_length(row: int, column: str, text: str) -> None:
    """Check a text's length before it is encoded."""
    if len(text) > MAX_TEXT_LENGTH:
        raise CellError(row, column, f"has {len(text):,} characters; at most {MAX_TEXT_LENGTH:,} are allowed")


def text_array(texts: Sequence[str], shape: tuple[int, ...]) -> Array:
    """Return an array of texts, which numpy would make as wide as the longest one."""
    array = np.empty(len(texts), object)
    array[:] = texts
    return array.reshape(shape)


EXACT_FLOATS = 2**53
"""From here, a float may be another whole number than its digits."""

MISSING = "must be a number, since this model takes no missing values"
"""What is wrong with a NaN."""

_NUMBER = re.compile(r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf(?:inity)?|nan)", re.ASCII | re.IGNORECASE)


class _OutOfRange(ValueError):
    """A number that a float does not hold."""


def parse_number(text: str) -> float:
    """Return the number of a text in ASCII digits, with white space around it; Python's ``float`` takes more.

    Raises:
        ValueError: it is not a number, or beyond the range of a float, such as 1e400, which is not an infinity.
    """
    if not _NUMBER.fullmatch(text.strip()):
        raise ValueError(f"{text!r:.40} is not a number")
    number = float(text)
    if math.isinf(number) and "inf" not in text.lower():
        raise _OutOfRange(f"{text:.40} is beyond the range of a float")
    return number


def is_number(text: str) -> bool:
    """Return whether a text is a number, of any size."""
    return _NUMBER.fullmatch(text.strip()) is not None


def _parse_float(cell: Any) -> float:
    if isinstance(cell, bool):
        raise TypeError
    return parse_number(cell) if isinstance(cell, str) else float(cell)


def _parse_int(cell: Any) -> int:
    if isinstance(cell, bool):
        raise TypeError
    if isinstance(cell, str):
        number = parse_number(cell)
        if cell.strip().lstrip("+-").isdigit():
            return int(cell)
        cell = number
    if int(cell) != cell:
        raise ValueError
    if isinstance(cell, float) and abs(cell) >= EXACT_FLOATS:
        raise _OutOfRange("write a whole number of this size with all its digits")
    return int(cell)


def _parse_bool(cell: Any) -> bool:
    value = _BOOLS.get(cell.strip().lower()) if isinstance(cell, str) else cell
    if not isinstance(value, bool):
        raise ValueError
    return value


_NEVER = object()  # equal to no cell
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def columns_of(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the columns of records; a cell that a record does not have is None."""
    names = dict.fromkeys(name for record in records for name in record)
    return {name: [record.get(name) for record in records] for name in names}


def load_json(text: str | bytes) -> Any:
    """Parse JSON whose numbers are within the range of a float.

    Raises:
        ValueError: it is not such JSON.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, parse_float=parse_number)


# --- Files of tables ---


SUFFIXES = (".csv", ".parquet", ".jsonl", ".ndjson")

_ROWS = re.compile(rb'\{\s*"rows"\s*:\s*\[')  # as of a request to POST /predict
_OTHER_SEPARATORS = (";", "\t")


@dataclass(frozen=True)
class Table:
    """A file's columns.

    Attributes:
        line_numbers: the line of each row; None: rows are counted.
    """

    columns: Mapping[str, Sequence[Any]]
    line_numbers: Sequence[int] | None = None

    def locate(self, row: int) -> str:
        return f"row {row + 1}" if self.line_numbers is None else f"line {self.line_numbers[row]}"


def kind_of(head: bytes) -> str:
    """Return the suffix of a table's format by its first bytes, for standard input."""
    if head.startswith(b"PAR1"):
        return ".parquet"
    begin = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if begin.startswith(b"[") or _ROWS.match(begin):
        return ".json"
    return ".jsonl" if begin.startswith(b"{") else ".csv"


def read_heading(file: IO[bytes]) -> list[str]:
    """Return the first line of a CSV file, and go back to its beginning; empty if it is not text."""
    try:
        return next(csv.reader([file.readline().decode("utf-8-sig")]), [])
    except (ValueError, csv.Error):
        return []
    finally:
        file.seek(0)


def read_table(source: str, content: IO[bytes], suffix: str) -> Table:
    """Read a table.

    Args:
        source: its name, for messages.
        suffix: of :data:`SUFFIXES`, its format, or ".json".

    Raises:
        DataError: it cannot be read; names the line.
    """
    if suffix == ".parquet":
        return _read_parquet(source, content)
    text = io.TextIOWrapper(content, encoding="utf-8-sig", newline="")
    try:
        if suffix == ".json":
            return _read_json(source, text)
        return _read_csv(source, text) if suffix == ".csv" else _read_jsonl(source, text)
    except UnicodeDecodeError as error:
        raise DataError(describe_not_utf8(source, error)) from None
    except (ValueError, csv.Error) as error:
        raise DataError(f"{source} cannot be read: {error}") from error
    finally:
        text.detach()


def describe_not_utf8(source: str, error: UnicodeDecodeError) -> str:
    """Return an error's message for a file that is compressed or in another encoding."""
    if error.object[:2] == b"\x1f\x8b":
        return f"{source} is compressed. Unpack it: zcat FILE | paceline predict MODEL - --output OUTPUT"
    encoding = "UTF-16" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "WINDOWS-1252"
    return (
        f"{source} is not UTF-8: it has the byte 0x{error.object[error.start]:02x}. Convert it, such as by: "
        f"iconv -f {encoding} -t UTF-8 FILE > CONVERTED"
    )


def _read_csv(source: str, text: io.TextIOWrapper) -> Table:
    reader = csv.reader(text)
    heading = next(reader, None)
    if heading is None:
        raise DataError(f"{source} is empty.")
    if len(heading) == 1 and (other := next((mark for mark in _OTHER_SEPARATORS if mark in heading[0]), None)):
        raise DataError(f"{source}, line 1: its cells are separated by {other!r}. Separate them by commas.")
    if len(set(heading)) != len(heading):
        raise DataError(f"{source}, line 1: a column's name occurs twice. Give each column a name of its own.")
    lines, line_numbers = [], []
    for number, line in csv_rows(reader, len(heading)):
        if len(line) != len(heading):
            raise DataError(f"{source}, line {number} has {len(line)} cells, but the heading has {len(heading)}.")
        lines.append(line)
        line_numbers.append(number)
    cells: Sequence[Sequence[str]] = list(zip(*lines, strict=True)) or [()] * len(heading)
    return Table(dict(zip(heading, cells, strict=True)), line_numbers)


def csv_rows(reader: Any, columns: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a ``csv.reader`` with their lines' numbers.

    In a table of one column, an empty line before another row is a row with an empty cell. Others are skipped.
    """
    empty = []
    for row in reader:
        if not row:
            empty.append(reader.line_num)
            continue
        if columns == 1:
            yield from ((number, [""]) for number in empty)
        empty.clear()
        yield reader.line_num, row


def _read_jsonl(source: str, text: io.TextIOWrapper) -> Table:
    records, line_numbers = [], []
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            record = load_json(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{source}, line {number} is not JSON: {_describe_json_error(error)}.") from None
        if not isinstance(record, dict):
            raise DataError(f'{source}, line {number} must be a JSON object, such as {{"age": 3}}.')
        records.append(record)
        line_numbers.append(number)
    return Table(columns_of(records), line_numbers)


def _read_json(source: str, text: io.TextIOWrapper) -> Table:
    try:
        document = load_json(text.read())
    except UnicodeDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source} is not JSON: {_describe_json_error(error)}.") from None
    records = records_of(document)
    if records is None:
        raise DataError(f'{source} must be a list of objects, such as [{{"age": 3}}].')
    return Table(columns_of(records))


def records_of(document: Any) -> Sequence[Mapping[str, Any]] | None:
    """Return the records of a JSON document: a list of objects, alone or as ``rows``; None if it has another form."""
    rows = document["rows"] if isinstance(document, dict) and list(document) == ["rows"] else document
    return rows if isinstance(rows, list) and all(isinstance(row, dict) for row in rows) else None


def _describe_json_error(error: Exception) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    line = "" if error.lineno == 1 else f"line {error.lineno}, "
    return f"{error.msg} at {line}column {error.colno}"


def _read_parquet(source: str, content: IO[bytes]) -> Table:
    parquet = import_library("pyarrow.parquet", f"{source}: Parquet", "pip install pyarrow")
    try:
        # From memory, since standard input cannot be read from its end.
        table = parquet.read_table(io.BytesIO(content.read()))
    except (OSError, ValueError) as error:
        raise DataError(f"{source} cannot be read: {error}") from error
    return Table({name: table[name].to_pylist() for name in table.column_names})


# --- Predictions, as records and as files ---


_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


@dataclass(frozen=True)
class Rows:
    """Input rows.

    Attributes:
        arrays: by input name, rows first; a large ``.npy`` stays on disk until it is read.
        names: of the rows, for reports.
        other_columns: of a table, which its predictions keep; None if the rows come from other files.
        suffix: of the format in which predictions go to standard output.
    """

    arrays: Mapping[str, Array]
    names: Sequence[str]
    other_columns: Mapping[str, Sequence[Any]] | None = None
    suffix: str = ".jsonl"


def plain_lists(outputs: Arrays) -> dict[str, list[Any]]:
    """Return the rows of each output in Python's numbers.

    Those of a float32 have the fewest digits that read back as the same float32: 0.3, not 0.30000001192092896.
    """
    return {
        name: (array.astype(str).astype(float) if array.dtype in (np.float16, np.float32) else array).tolist()
        for name, array in outputs.items()
    }


def records(outputs: Arrays, spec: ModelSpec, rows: Rows, first: int) -> Iterator[dict[str, Any]]:
    """Yield a readable record of each row: its name, most likely label, its probability, and all outputs."""
    values = plain_lists(outputs)
    for i in range(rows_of(outputs)):
        record = {"row": first + i, "source": rows.names[first + i], **_label(values, spec, i)}
        record["outputs"] = {name: each[i] for name, each in values.items()}
        yield record


def table_records(
    outputs: Mapping[str, Sequence[Any] | Array],
    spec: ModelSpec,
    other_columns: Mapping[str, Sequence[Any]],
    first: int,
) -> Iterator[dict[str, Any]]:
    """Yield a flat record of each row of a table: its other columns, then label, probability and the other outputs.

    A prediction whose name a column has already is called ``predicted_NAME``.

    Args:
        outputs: the rows of each output, as :func:`plain_lists` or as arrays, whose elements then stay as they are.
        first: the number of the first row in ``other_columns``.
    """
    for i in range(len(next(iter(outputs.values())))):
        predicted = {**{name: values[i] for name, values in outputs.items()}, **_label(outputs, spec, i)}
        record = {name: cells[first + i] for name, cells in other_columns.items()}
        yield record | {(f"predicted_{name}" if name in record else name): value for name, value in predicted.items()}


def _label(outputs: Mapping[str, Sequence[Any] | Array], spec: ModelSpec, i: int) -> dict[str, Any]:
    if spec.label is None or spec.label not in outputs:
        return {}
    number = int(outputs[spec.label][i])
    # An output of the same name stays.
    name = "label" if spec.label == "label" or "label" not in outputs else "label_name"
    label: dict[str, Any] = {name: spec.labels[number] if number < len(spec.labels) else number}
    if spec.probabilities is not None and spec.probabilities in outputs:
        name = "probability" if "probability" not in outputs else "label_probability"
        label[name] = outputs[spec.probabilities][i][number]
    return label


def check_columns(rows: Rows, output: str, suffix: str) -> None:
    """Check before hours of work that an output can hold the other columns of a table.

    Raises:
        DataError: a column of a Parquet file cannot hold these cells; names it.
    """
    if suffix != ".parquet":
        return
    pyarrow = import_library("pyarrow", "--output: Parquet", "pip install pyarrow")
    for name, cells in ({"source": rows.names} if rows.other_columns is None else rows.other_columns).items():
        try:
            pyarrow.array(list(cells))
        except (ValueError, TypeError, OverflowError, NotImplementedError) as error:
            reason = " ".join(str(error).split())
            raise DataError(
                f"--output {output}: Parquet cannot hold the column {name}: {reason:.200}. Make its cells of one kind, "
                "leave the column out, or write a .jsonl."
            ) from None


def write(file: IO[bytes], suffix: str, parts: Iterator[Arrays], spec: ModelSpec, rows: Rows) -> None:
    """Write the predictions of all rows, given in parts, as one of :data:`FORMATS`."""
    if suffix == ".npz":
        whole = list(parts)
        arrays = {name: np.concatenate([part[name] for part in whole]) for name in whole[0]}
        np.savez(file, allow_pickle=False, **arrays)
        return
    if suffix == ".parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(_records(parts, spec, rows))), file)
        return
    # Not every name of a file, nor every text of JSON, is Unicode.
    text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
    if suffix == ".csv":
        writer = csv.writer(text)
        for number, record in enumerate(_records(parts, spec, rows)):
            flat = dict(_csv_cells(record, spec))
            if number == 0:
                writer.writerow(map(_csv_cell, flat))
            writer.writerow(map(_csv_cell, flat.values()))
    else:
        text.writelines(json.dumps(record, default=str) + "\n" for record in _records(parts, spec, rows))
    text.flush()
    text.detach()


FORMATS = (".npz", *SUFFIXES)


def _records(parts: Iterator[Arrays], spec: ModelSpec, rows: Rows) -> Iterator[dict[str, Any]]:
    first = 0
    for part in parts:
        if rows.other_columns is None:
            yield from records(part, spec, rows, first)
        else:
            yield from table_records(plain_lists(part), spec, rows.other_columns, first)
        first += rows_of(part)


def csv_lines(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return records of the same names as CSV."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_csv_cell, rows[0]))
    writer.writerows(map(_csv_cell, row.values()) for row in rows)
    return text.getvalue()


def _csv_cells(record: Mapping[str, Any], spec: ModelSpec) -> Iterator[tuple[str, Any]]:
    """Yield a cell for each element of an output, under the name of its class if it has one."""
    outputs = record.get("outputs") if "row" in record else None
    flat = dict(record)
    if isinstance(outputs, dict):
        del flat["outputs"]
        # The label's name is in the record already.
        flat |= {name: value for name, value in outputs.items() if name != spec.label or not spec.labels}
    for name, value in flat.items():
        if not isinstance(value, list) or name.removeprefix("predicted_") not in spec.outputs:
            yield name, value
            continue
        cells = np.ravel(value).tolist()
        is_labelled = name == spec.probabilities and len(spec.labels) == len(cells)
        columns = list(spec.outputs[name.removeprefix("predicted_")].columns)
        numbered = [f"{name}[{i}]" for i in range(len(cells))]
        headings = spec.labels if is_labelled else columns if len(columns) == len(cells) else numbered
        yield from zip(headings, cells, strict=True)


def _csv_cell(value: Any) -> Any:
    """Return a cell that a spreadsheet does not take for a formula: https://owasp.org/www-community/attacks/CSV_Injection.

    Labels come from a package, and the names of files and the other columns of a table from others. Negative numbers
    stay as they are.
    """
    if not isinstance(value, str) or not value.startswith(_FORMULA):
        return value
    return value if is_number(value) else f"'{value}"
