"""Files of tables, in CSV, Parquet, JSONL and JSON, and predictions as records and files."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from paceline.core.errors import DataError
from paceline.core.plugins import import_library
from paceline_serving.model import Array, Arrays, ModelSpec, rows_of
from paceline_serving.tables import columns_of, is_number, load_json

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
