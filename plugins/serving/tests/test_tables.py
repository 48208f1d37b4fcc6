"""Tables as input: columns by name, other columns in the output, and errors that name the place."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from plugins.serving.tests.conftest import Server

from paceline.cli import app
from paceline.core.errors import ConfigError, DataError
from paceline.core.inference import TensorSpec
from paceline_serving.batch_predict import read_rows
from paceline_serving.model import ModelSpec
from paceline_serving.protocol import example_rows, parse_rows
from paceline_serving.tables import Rows, check_columns, plain_lists, table_records, write

INPUTS = {
    "age": TensorSpec(dtype="int64", minimum=0, maximum=120),
    "income": TensorSpec(dtype="float32"),
    "member": TensorSpec(dtype="bool"),
    "visits": TensorSpec(dtype="float32", shape=(2,)),
}
OUTPUTS = {"probabilities": TensorSpec(dtype="float32", shape=(2,)), "label": TensorSpec(dtype="int64")}
SPEC = ModelSpec(
    name="churn",
    version="1",
    inputs=INPUTS,
    outputs=OUTPUTS,
    labels=("stays", "leaves"),
    probabilities="probabilities",
    label="label",
)
CSV = 'id,income,age,label,member,visits[0],visits[1]\na7,1.5,30,"x,\ny",true,1,2\nb8,-2,40,,0,3,4.5\n'
RECORDS = [
    {"id": "a7", "income": 1.5, "age": 30, "label": "x,\ny", "member": True, "visits": [1, 2]},
    {"id": "b8", "income": -2, "age": 40, "label": "", "member": False, "visits": [3, 4.5]},
]
PREDICTED = {"probabilities": np.array([[0.75, 0.25], [0.5, 0.5]], np.float32), "label": np.array([0, 1])}


def write_table(path: Path, suffix: str) -> Path:
    path = path.with_suffix(suffix)
    if suffix == ".csv":
        path.write_text("\ufeff" + CSV, newline="")
    elif suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), path)
    else:
        path.write_text("\n".join(json.dumps(record) for record in RECORDS) + "\n\n")
    return path


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".jsonl", ".ndjson"])
def test_columns_are_found_by_name_and_others_are_kept(tmp_path: Path, suffix: str) -> None:
    rows = read_rows([write_table(tmp_path / "people", suffix)], SPEC)
    assert {name: array.dtype.name for name, array in rows.arrays.items()} == {n: t.dtype for n, t in INPUTS.items()}
    assert [rows.arrays[name].tolist() for name in ("age", "income", "member")] == [[30, 40], [1.5, -2], [True, False]]
    assert rows.arrays["visits"].tolist() == [[1, 2], [3, 4.5]]
    output = io.BytesIO()
    write(output, suffix, iter([PREDICTED]), SPEC, rows)
    kept = {"id": ["a7", "b8"], "label": ["x,\ny", ""], "predicted_label": ["stays", "leaves"]}
    found: list[dict[str, Any]]
    if suffix == ".csv":
        found = list(csv.DictReader(io.StringIO(output.getvalue().decode(), newline="")))
        assert list(found[0]) == ["id", "label", "stays", "leaves", "predicted_label", "probability"]
        assert [record["stays"] for record in found] == ["0.75", "0.5"]
    else:
        if suffix == ".parquet":
            found = pyarrow.parquet.read_table(io.BytesIO(output.getvalue())).to_pylist()
        else:
            found = [json.loads(line) for line in output.getvalue().splitlines()]
        assert [record["probabilities"] for record in found] == [[0.75, 0.25], [0.5, 0.5]]
    assert {name: [record[name] for record in found] for name in kept} == kept


def test_named_elements_of_an_output_are_columns() -> None:
    outputs = {"size": TensorSpec(dtype="float32", shape=(2,), columns={"width": "m", "height": "cm"})}
    spec = replace(SPEC, outputs=outputs, labels=(), probabilities=None, label=None)
    rows = Rows(arrays={}, names=["a", "b"], other_columns={"id": ["a", "b"]})
    output = io.BytesIO()
    write(output, ".csv", iter([{"size": np.array([[1, 2], [3, 4.5]])}]), spec, rows)
    assert output.getvalue().decode().split() == ["id,width,height", "a,1.0,2.0", "b,3.0,4.5"]


@pytest.mark.parametrize(("kind", "written"), [("float32", "0.3 1e-10 nan inf"), ("float16", "0.3 0.0 nan inf")])
def test_a_number_has_the_digits_of_its_type(kind: str, written: str) -> None:
    spec = replace(SPEC, outputs={"y": TensorSpec(dtype=kind)}, labels=(), probabilities=None, label=None)
    values = np.array([0.3, 1e-10, np.nan, np.inf], np.dtype(kind))
    output = io.BytesIO()
    write(output, ".csv", iter([{"y": values}]), spec, Rows({}, ["0"] * 4, {}))
    assert output.getvalue().decode().split() == ["y", *written.split()]
    random = np.random.default_rng(0).standard_normal((1000, 3)).astype(kind)
    assert np.array_equal(np.array(plain_lists({"y": random})["y"]).astype(kind), random)
    assert plain_lists({"y": np.array([0.3])}) == {"y": [0.3]}
    assert plain_lists({"y": np.array([2**53 + 1])}) == {"y": [2**53 + 1]}


def test_an_output_is_not_lost_under_the_name_of_the_label_or_its_probability() -> None:
    names = {"probabilities": "probability", "label": "topic"}
    outputs = {names[name]: tensor for name, tensor in OUTPUTS.items()}
    spec = replace(SPEC, outputs=outputs, probabilities="probability", label="topic")
    predicted = {names[name]: array for name, array in PREDICTED.items()}
    [first, _] = table_records(plain_lists(predicted), spec, {"id": [7, 8]}, 0)
    share = {"label": "stays", "label_probability": 0.75}
    assert first == {"id": 7, "probability": [0.75, 0.25], "topic": 0, **share}
    text = io.BytesIO()
    write(text, ".csv", iter([predicted]), spec, Rows(arrays={}, names=["a", "b"], other_columns={}))
    heading = "stays,leaves,topic,label,label_probability"
    assert text.getvalue().decode().split() == [heading, "0.75,0.25,0,stays,0.75", "0.5,0.5,1,leaves,0.5"]
    other = replace(spec, outputs={**outputs, "label": TensorSpec(dtype="float32")})
    [record, _] = table_records({**plain_lists(predicted), "label": [1.5, 2.5]}, other, {}, 0)
    assert (record["label"], record["label_name"]) == (1.5, "stays")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.csv", CSV.replace("30", "old"), "t.csv, line 3, column age: must be a whole number, but is 'old'."),
        ("t.csv", CSV.replace(",40,", ",,"), "t.csv, line 4, column age: must be a whole number, but is empty."),
        ("t.csv", CSV.replace(",40,", ",121,"), "line 4, column age: must be between 0 and 120, but is 121."),
        ("t.csv", CSV.replace(",40,", ",4.5,"), "line 4, column age: must be a whole number, but is '4.5'."),
        ("t.csv", CSV.replace("-2", "1e39"), "line 4, column income: must be between"),
        (
            "t.csv",
            CSV.replace("-2", "1e400"),
            "line 4, column income: must be a number, but is '1e400' \\(1e400 is beyond the range",
        ),
        ("t.csv", CSV.replace("true", "2"), "column member: must be true or false, but is '2'."),
        ("t.csv", CSV.replace("income", "salary"), "column income: is missing; the columns are id, salary, age"),
        ("t.csv", CSV.replace("income", "age"), "line 1: a column's name occurs twice"),
        ("t.csv", CSV + "c9,1\n", "line 5 has 2 cells, but the heading has 7"),
        ("t.csv", "", "t.csv is empty"),
        ("t.csv", CSV.splitlines()[0], "t.csv has no rows"),
        ("t.jsonl", '{"age": 1}\n{', "t.jsonl, line 2 is not JSON"),
        ("t.jsonl", "[1]", "line 1 must be a JSON object"),
        (
            "t.jsonl",
            json.dumps({**RECORDS[0], "age": "30"}),
            "column age: must be a whole number, but is the text '30'",
        ),
        ("t.jsonl", json.dumps({**RECORDS[0], "visits": [1]}), r"column visits: must be a list of the shape \[2\]"),
        ("t.jsonl", json.dumps({**RECORDS[0], "visits": [1, None]}), "column visits: must be a number, but is empty"),
        ("t.jsonl", json.dumps({**RECORDS[0], "age": [True, None]}), r"but is \[true, null\]\."),
        ("t.json", json.dumps([*RECORDS, {"age": 1}]), "t.json, row 3, column income: must be a number, but is empty"),
        ("t.json", "[{", "t.json cannot be read: Expecting"),
        ("t.csv", CSV.replace(",", ";"), "t.csv, line 1: its cells are separated by ';'. Separate them by commas."),
        ("t.csv", CSV.replace(",", "\t"), "line 1: its cells are separated by '.t'"),
        ("t.csv.gz", "", "t.csv.gz is compressed. Unpack it: zcat .*t.csv.gz | paceline predict MODEL -"),
        ("t.parquet", "PAR1", "t.parquet cannot be read"),
    ],
)
def test_an_error_names_file_line_and_column(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content, newline="")
    with pytest.raises(DataError, match=said) as caught:
        read_rows([tmp_path / name], SPEC)
    assert len(str(caught.value).splitlines()) == 1


ONE = ModelSpec(name="m", version="1", inputs={"x": TensorSpec(dtype="float32")}, outputs={})
MAY_MISS = replace(ONE, inputs={"x": TensorSpec(dtype="float32", allow_missing=True)})
OUTPUT = replace(ONE, outputs={"y": TensorSpec(dtype="float32")})
WHOLE = replace(ONE, inputs={"x": TensorSpec(dtype="int64")})


def write_cells(path: Path, suffix: str, cells: list[Any]) -> Path:
    """Write a column ``x``; texts are the cells of a CSV, with or without a heading, or elements of JSON."""
    path = path.with_suffix(".csv" if suffix == "nameless" else suffix)
    if suffix in (".csv", "nameless"):
        path.write_text("\n".join([*(["x"] if suffix == ".csv" else []), *map(str, cells)]) + "\n", newline="")
    elif suffix == ".jsonl":
        path.write_text("".join(f'{{"x": {cell}}}\n' for cell in cells))
    elif suffix == ".json":
        path.write_text(f'{{"x": [{", ".join(map(str, cells))}]}}')
    elif suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"x": [float(cell) for cell in cells]}), path)
    elif suffix == ".npy":
        np.save(path, np.array([float(cell) for cell in cells]))
    else:
        np.savez(path, x=np.array([float(cell) for cell in cells]))
    return path


@pytest.mark.parametrize("suffix", [".csv", "nameless", ".jsonl", ".json", ".parquet", ".npy", ".npz"])
def test_a_nan_is_a_missing_value_in_every_format(tmp_path: Path, suffix: str) -> None:
    path = write_cells(tmp_path / "t", suffix, [1.5, "NaN", 2])
    np.testing.assert_equal(read_rows([path], MAY_MISS).arrays["x"], np.float32([1.5, np.nan, 2]))
    with pytest.raises(
        DataError, match=r"(row 2|line [23])\b.*must be a number, since this model takes no missing"
    ) as e:
        read_rows([path], ONE)
    assert ("line 3" if suffix == ".csv" else "2") in str(e.value)


def is_like_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("spec", [ONE, MAY_MISS, WHOLE], ids=["number", "may be missing", "whole"])
@pytest.mark.parametrize("suffix", [".csv", "nameless", ".jsonl", ".json"])
@pytest.mark.parametrize("cell", ["1_5", "１５", "١٥", "0x1F", "1e5_0", "1 5", "1,5", "+-1", "½", "²", "1e400"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_number_is_written_in_ascii_digits_alone(
    tmp_path: Path, spec: ModelSpec, suffix: str, cell: str, place: int
) -> None:
    """Python's own ``int`` and ``float`` take more. In a first line without a heading, such a cell is no heading."""
    cells = ["1", "2"]
    cells.insert(place, cell if "csv" not in suffix else f'"{cell}"')
    path = write_cells(tmp_path / "t", suffix, cells)
    if suffix == ".json" and cell == "1,5":
        return  # two numbers
    if suffix == "nameless" and place == 0 and not is_like_number(cell):
        return  # a heading
    with pytest.raises(DataError):
        read_rows([path], spec)


@pytest.mark.parametrize(
    ("text", "number"), [("15", 15), (" 1.5 ", 1.5), ("-.5", -0.5), ("5.", 5), ("+1E2", 100), ("inf", math.inf)]
)
def test_the_forms_of_a_number(tmp_path: Path, text: str, number: float) -> None:
    path = write_cells(tmp_path / "t", ".csv", [text])
    assert read_rows([path], ONE).arrays["x"].tolist() == [number]
    if number % 1 == 0:
        assert read_rows([path], WHOLE).arrays["x"].tolist() == [number]


@pytest.mark.parametrize("suffix", [".csv", "nameless", ".jsonl", ".json"])
def test_a_whole_number_is_the_one_that_was_written(tmp_path: Path, suffix: str) -> None:
    path = write_cells(tmp_path / "t", suffix, [2**53 + 1, 7])
    assert read_rows([path], WHOLE).arrays["x"].tolist() == [2**53 + 1, 7]
    path = write_cells(tmp_path / "t", suffix, ["9007199254740993.0"])
    with pytest.raises(DataError, match=r"with all its digits|other whole numbers"):
        read_rows([path], WHOLE)


@pytest.mark.parametrize("suffix", [".csv", "nameless"])
def test_an_empty_line_of_one_column_is_a_row(tmp_path: Path, suffix: str) -> None:
    path = write_cells(tmp_path / "t", suffix, ["1", "", "3", "", ""])
    with pytest.raises(DataError, match=r"line (2|3)\b"):
        read_rows([path], ONE)
    rows = read_rows([path], MAY_MISS)
    np.testing.assert_equal(rows.arrays["x"], np.float32([1, np.nan, 3]))
    if suffix == ".csv":
        assert rows.names == ["line 2", "line 3", "line 4"]
        path.write_text("x,y\n1,a\n\n3,b\n")
        assert read_rows([path], ONE).names == ["line 2", "line 4"], "no row has one cell here"


def test_a_row_before_which_a_byte_order_mark_stands_is_no_heading(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\ufeff1\n2\n")
    assert read_rows([tmp_path / "t.csv"], ONE).arrays["x"].tolist() == [1, 2]
    (tmp_path / "t.csv").write_text("value\n1\n2\n")
    assert read_rows([tmp_path / "t.csv"], ONE).arrays["x"].tolist() == [1, 2]


def test_an_accented_name_is_one_name_in_both_of_its_spellings(tmp_path: Path) -> None:
    composed, decomposed = "Größe", unicodedata.normalize("NFD", "Größe")
    spec = replace(ONE, inputs={composed: TensorSpec(dtype="float32")})
    (tmp_path / "t.csv").write_text(f"id,{decomposed}\na,1\n")
    rows = read_rows([tmp_path / "t.csv"], spec)
    assert (rows.arrays[composed].tolist(), rows.other_columns) == ([1], {"id": ("a",)})
    (tmp_path / "t.csv").write_text(f"{composed},{decomposed}\n1,2\n")
    rows = read_rows([tmp_path / "t.csv"], spec)
    assert (rows.arrays[composed].tolist(), rows.other_columns) == ([1], {decomposed: ("2",)})


def test_what_parquet_cannot_hold_is_known_before_the_first_row(tmp_path: Path) -> None:
    table = tmp_path / "t.jsonl"
    for cells, said in (
        (["a", 1], "the column id"),
        (["\ud800"], "the column id"),
        ([2**70], "the column id"),
        ([[1], "a"], "the column id"),
        (["a", None], ""),
        ([1, 1.5], ""),
    ):
        table.write_text("".join(json.dumps({"x": 1, "id": cell}) + "\n" for cell in cells))
        rows = read_rows([table], ONE)
        for suffix in (".jsonl", ".csv"):
            check_columns(rows, "o", suffix)
            write(io.BytesIO(), suffix, iter([{"y": np.zeros(len(cells))}]), OUTPUT, rows)
        if said:
            with pytest.raises(DataError, match=f"Parquet cannot hold {said}: .* or write a .jsonl"):
                check_columns(rows, "o", ".parquet")
        else:
            check_columns(rows, "o", ".parquet")
            write(io.BytesIO(), ".parquet", iter([{"y": np.zeros(len(cells))}]), OUTPUT, rows)


@pytest.mark.parametrize(
    ("name", "encoding", "command"),
    [
        *((name, "cp1252", "iconv -f WINDOWS-1252") for name in ("t.csv", "t.jsonl", "t.json")),
        *((name, "utf-16", "iconv -f UTF-16 -t UTF-8") for name in ("t.csv", "t.jsonl")),
    ],
)
def test_a_file_of_another_encoding_is_told_how_to_convert(
    tmp_path: Path, name: str, encoding: str, command: str
) -> None:
    content = CSV.replace("a7", "Zürich") if name == "t.csv" else '{"id": "Zürich"}'
    (tmp_path / name).write_bytes(content.encode(encoding))
    with pytest.raises(DataError, match="is not UTF-8: it has the byte 0xf") as caught:
        read_rows([tmp_path / name], SPEC)
    assert command in str(caught.value)


def test_json_holds_records_as_a_request_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, document in (("list.json", RECORDS), ("rows.json", {"rows": RECORDS})):
        (tmp_path / name).write_text(json.dumps(document, indent=1))
        rows = read_rows([tmp_path / name], SPEC)
        assert rows.arrays["age"].tolist() == [30, 40]
        assert rows.other_columns == {"id": ["a7", "b8"], "label": ["x,\ny", ""]}
        assert (rows.names, rows.suffix) == (["row 1", "row 2"], ".jsonl")
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO((tmp_path / name).read_bytes())))
        piped = read_rows([Path("-")], SPEC)
        assert (piped.names, piped.suffix) == (rows.names, rows.suffix)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(gzip.compress(CSV.encode()))))
    with pytest.raises(DataError, match=r"standard input is compressed\. Unpack it: zcat"):
        read_rows([Path("-")], SPEC)
    arrays = {name: [record[name] for record in RECORDS] for name in INPUTS}
    (tmp_path / "arrays.json").write_text(json.dumps(arrays))
    assert read_rows([tmp_path / "arrays.json"], SPEC).arrays["age"].tolist() == [30, 40], "by input, as before"


def test_several_tables_and_rows_of_any_length(tmp_path: Path) -> None:
    several = [write_table(tmp_path / "a", ".csv"), write_table(tmp_path / "b", ".csv")]
    rows = read_rows(several, SPEC)
    assert rows.arrays["age"].tolist() == [30, 40] * 2
    assert rows.other_columns == {"id": ["a7", "b8"] * 2, "label": ["x,\ny", ""] * 2}
    several[1].write_text(CSV.replace("id", "key"), newline="")
    with pytest.raises(DataError, match="do not have the same columns"):
        read_rows(several, SPEC)
    tokens = ModelSpec(name="m", version="1", inputs={"ids": TensorSpec(dtype="int64", shape=(None,))}, outputs={})
    (tmp_path / "t.csv").write_text('ids\n"[1, 2]"\n"[3, 4, 5]"\n')
    with pytest.raises(DataError, match=r"line 3, column ids: has the shape \[3\], and the first row \[2\]"):
        read_rows([tmp_path / "t.csv"], tokens)


def test_a_table_through_a_pipe(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (2, 1, 28, 28)).tolist()
    lines = "".join(json.dumps({"image": picture, "id": f"p{i}"}) + "\n" for i, picture in enumerate(pictures))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    assert app(["predict", server.url, "-", "--output", "-"], exit_on_error=False) == 0
    found = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    assert [record["id"] for record in found] == ["p0", "p1"]
    assert [max(record["probabilities"]) for record in found] == [record["probability"] for record in found]
    with pytest.raises(ConfigError, match="--json and --output - both print"):
        app(["predict", server.url, "-", "--output", "-", "--json"], exit_on_error=False)
    for words in (["rows.csv", "--outptu", "x"], ["rows.csv", "--output", "--json"]):
        with pytest.raises(ConfigError, match="is not an option"):
            app(["predict", server.url, *words], exit_on_error=False)


def test_the_example_of_a_request_is_a_request() -> None:
    request = example_rows(SPEC)
    assert request == '{"rows":[{"age":0,"income":0.0,"member":false,"visits":[0.0,0.0]}]}'
    parsed = parse_rows(SPEC, request.encode())
    assert {name: len(array) for name, array in parsed.inputs.items()} == dict.fromkeys(INPUTS, 1)
    assert parsed.other_columns == {}


def test_the_plain_form_of_a_request(server: Server) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (1, 28, 28)).tolist()
    rows = [{"image": picture, "id": "a"}, {"image": picture}]
    answer = httpx.post(f"{server.url}/predict", json={"rows": rows}, timeout=60)
    assert answer.status_code == 200, answer.text
    first, second = answer.json()["predictions"]
    assert (first.pop("id"), second.pop("id")) == ("a", None)
    assert first["label"] == second["label"]
    assert first["probability"] == max(first["probabilities"])
    # No digits beyond those of a float32.
    assert all(number == float(str(np.float32(number))) for number in first["probabilities"])
    assert httpx.post(f"{server.url}/predict/fashion-mnist", json={"rows": rows}, timeout=60).json() == answer.json()
    for document, said in (
        ({"rows": [{"picture": picture}]}, "rows: image is missing; the columns are picture."),
        (
            {"rows": [rows[0], {"image": [[1]]}]},
            "rows[1]: image must be a list of the shape [1, 28, 28], but is [[1]].",
        ),
        ({"rows": []}, 'the body must be like {"rows":[{"image":'),
        ([], 'the body must be like {"rows":[{"image":'),
    ):
        answer = httpx.post(f"{server.url}/predict", json=document, timeout=60)
        assert answer.status_code == 400
        assert said in answer.json()["error"]
    assert httpx.get(f"{server.url}/predict", timeout=60).status_code == 405
    assert httpx.post(f"{server.url}/predict/other", json={}, timeout=60).status_code == 404
    assert httpx.post(f"{server.url}/predict", content=b" " * 300_000, timeout=60).status_code == 413
