"""Texts, categories and missing values as inputs: by every protocol, in tables, and from a package's data."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import tritonclient.grpc
import tritonclient.http
from plugins.serving.tests.conftest import Server, start_server
from plugins.serving.tests.packages import put_files
from plugins.serving.tests.page_models import NOTES, VISIT, VISIT_ROW, VISIT_SUM, Visit, put_visits
from plugins.serving.tests.test_fuzz import try_schema
from tests.processes import Processes
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from paceline.cli import app
from paceline.core.errors import ConfigError, DataError, PackageError
from paceline.core.inference import InferenceSignature, TensorSpec
from paceline.runs.package import open_package
from paceline_serving.app import _signature_changes, open_model
from paceline_serving.batch_predict import read_rows
from paceline_serving.batching import InvalidRequest
from paceline_serving.client import encode_binary
from paceline_serving.encodings import MAX_TEXT_LENGTH, Categories, Dates, EncodingError, Tokenizer, Vocabulary
from paceline_serving.grpc_service import parse_message
from paceline_serving.model import INPUTS, ModelSpec, PackageInputs, client_specs, read_inputs
from paceline_serving.openapi import describe
from paceline_serving.protocol import example_request, example_rows, parse_request, parse_rows
from paceline_serving.tables import text_array

INPUTS_OF_SPEC, ENCODINGS = client_specs(VISIT)
SPEC = ModelSpec(
    name="visits",
    version="1",
    inputs=INPUTS_OF_SPEC,
    outputs={"sum": TensorSpec(dtype="float32")},
    encodings=ENCODINGS,
    example=VISIT_ROW,
)
RECORD = {"age": 39.5, "income": None, **{name: value for name, value in VISIT_ROW.items() if name != "numbers"}}
ENCODED = {"city": 1, "mood": 0, "note": [2, 1, 1, 3], "since": [2026, 5, 0], "hours": [1.5, 2, 0.25], "member": True}


def only(name: str) -> ModelSpec:
    """The model with one input alone."""
    encodings = {name: SPEC.encodings[name]} if name in SPEC.encodings else {}
    return replace(SPEC, inputs={name: SPEC.inputs[name]}, encodings=encodings, example={})


def ask(model: ModelSpec, data: Any, shape: list[int], datatype: str = "BYTES") -> Any:
    """What a JSON request for the only input becomes."""
    (name,) = model.inputs
    tensor = {"name": name, "datatype": datatype, "shape": shape, "data": data}
    return parse_request(model, json.dumps({"inputs": [tensor]}).encode(), None).inputs[name]


# --- Encodings ---


def test_categories_of_a_column() -> None:
    seen = Categories.observe(["red", "blue", None, float("nan"), "", 3, pandas.NA])
    assert seen.codes == {"3": 0, "blue": 1, "red": 2}
    assert seen.encode(["red", 3]).tolist() == [2, 0]
    with pytest.raises(
        EncodingError, match=r"^value 1 must be one of '3', 'blue', 'red', but is 'x\\x1b\[1m\\u202e'\. "
    ) as raised:
        seen.encode(["red", "x\x1b[1m\u202e"])
    assert str(raised.value).endswith(". Categories with a code unknown= take it."), "advice for the task's author"
    assert "Categories" not in raised.value.problem, "which clients are told"
    with pytest.raises(EncodingError, match=r"value 0 .* but is empty.*missing="):
        seen.encode([None])
    open_ = Categories.observe(["red", "blue"], unknown=True, missing=True)
    assert (open_.unknown, open_.missing, open_.size) == (2, 3, 4)
    assert open_.encode(["blue", "green", "", None, float("nan")]).tolist() == [0, 2, 3, 3, 3]
    assert [open_.decode(code) for code in range(4)] == ["blue", "red", "unknown", ""]
    many = Categories.observe(map(str, range(10, 30)))
    with pytest.raises(EncodingError, match=r"'19' and 10 more, but is 'y'"):
        many.encode(["y"])
    with pytest.raises(ConfigError, match="codes from 0"):
        Categories({"a": -1})


def test_both_spellings_of_an_accented_letter_are_one_text() -> None:
    """macOS writes file names with the letter and its accent apart."""
    composed, apart = (unicodedata.normalize(form, "Zürich") for form in ("NFC", "NFD"))
    assert composed != apart
    for given in ([composed], [apart], [composed, apart]):
        seen = Categories.observe([*given, "Bern"])
        assert seen.codes == {"Bern": 0, composed: 1}
        assert seen.encode([composed, apart]).tolist() == [1, 1]
        words = Vocabulary.observe(given, max_length=2)
        assert words.encode([composed, apart]).tolist() == [[2, 0]] * 2
    # Those of earlier packages, and of tasks that give their codes, keep them.
    earlier = Categories({apart: 3, "Bern": 0}, unknown=7)
    assert earlier.encode([composed, apart, "Genf"]).tolist() == [3, 3, 7]
    both = Categories({apart: 3, composed: 4})
    assert both.encode([composed, apart]).tolist() == [4, 3]
    assert Vocabulary(ids={"u": 2}, max_length=9).encode([apart])[0].tolist().count(1) > 1, "as it was split before"


def test_dates_as_numbers() -> None:
    parts = Dates(("days", "year", "month", "day", "weekday", "hour", "minute"))
    moment = datetime(2026, 1, 31, 8, 30, tzinfo=timezone(timedelta(hours=2)))
    expected = [(date(2026, 1, 31) - date(1970, 1, 1)).days, 2026, 1, 31, 5, 8, 30]
    for value in ("2026-01-31 08:30", "2026-01-31T08:30:59Z", moment, pandas.Timestamp(moment), "20260131T0830"):
        assert parts.encode([value]).tolist() == [expected], value
    assert parts.decode(expected) == "2026-01-31T08:30"
    assert Dates(("days",)).encode([date(1969, 12, 31), np.datetime64("1970-01-02")]).tolist() == [[-1], [1]]

    open_ = Dates(("weekday", "month"), missing=True)
    assert open_.shape == (3,)
    assert open_.encode(["2026-01-31", "", None, pandas.NaT]).tolist() == [[5, 1, 0], [0, 0, 1], [0, 0, 1], [0, 0, 1]]
    found = date.fromisoformat(open_.decode([5, 2, 0]))
    assert (found.weekday(), found.month) == (5, 2), "one of the dates that have these numbers"
    assert open_.decode([0, 0, 1]) == open_.describe([0, 0, 1]) == ""
    assert open_.describe([5, 2, 0]) == "weekday 5, month 2", "people read no date that was not in the data"
    assert parts.describe(expected) == "2026-01-31T08:30"
    assert Dates(("year", "month")).decode([2026, 13]) == "year 2026, month 13"
    assert Dates(("days",)).decode([10**9]) == "days 1000000000"
    assert Dates(("month", "day", "weekday")).decode([2, 29, 3]) == "2024-02-29"

    with pytest.raises(EncodingError, match=r"^value 1 must be a date such as 2026-01-31, but is '31\.1\.2026'\.$"):
        Dates(("year",)).encode(["2026-01-31", "31.1.2026"])
    with pytest.raises(EncodingError, match=r"a date such as 2026-01-31T08:30, but is empty\. Dates with missing=True"):
        Dates(("hour",)).encode([None])
    for wrong in ((), ("year", "year"), ("century",)):
        with pytest.raises(ConfigError, match="the parts of Dates must be some of days, year"):
            Dates(wrong)


def test_a_table_of_parquet_holds_dates(tmp_path: Path) -> None:
    model = only("since")
    dates = pyarrow.table({"since": pyarrow.array([date(2026, 1, 31), None])})
    pyarrow.parquet.write_table(dates, tmp_path / "t.parquet")
    assert read_rows([tmp_path / "t.parquet"], model).arrays["since"].tolist() == [[2026, 5, 0], [0, 0, 1]]
    (tmp_path / "t.csv").write_text("id,since\n1,2026-01-31\n2,1.2.2026\n")
    with pytest.raises(
        DataError, match=r"t\.csv, line 3, column since: must be a date such as 2026-01-31, but is '1\."
    ):
        read_rows([tmp_path / "t.csv"], model)
    strict = replace(model, encodings={"since": Dates(("hour",))}, inputs={"since": TensorSpec(dtype="str")})
    assert strict.row == {"since": "2026-01-31"}
    assert [each.type_text for each in strict.fields] == ["date and time"]
    assert [each.type_text for each in model.fields] == ["date"]
    texts = replace(model, encodings={"since": NOTES})
    assert _signature_changes(texts, model) == ["input since takes only dates"]
    assert _signature_changes(model, model) == []


def test_a_vocabulary_of_texts() -> None:
    words = Vocabulary.observe(["Good, good film!", "a bad film"], max_length=5, max_size=5, lowercase=True)
    assert words.ids == {"film": 2, "good": 3, "!": 4}, "the most frequent, then by alphabet"
    assert words.encode(["GOOD film?", "", "film " * 9]).tolist() == [[3, 2, 1, 0, 0], [0] * 5, [2] * 5]
    assert words.decode([3, 2, 1, 0, 0]) == "good film ?"
    assert words.decode([3, 2, 4, 0, 0]) == "good film!", "as people write it"
    assert words.size == 5
    letters = Vocabulary.observe(["abba"], max_length=3, split="characters")
    assert letters.encode(["bax"]).tolist() == [[3, 2, 1]]
    assert letters.decode([3, 2, 0]) == "ba"
    with pytest.raises(EncodingError, match=f"value 1 has 65,537 characters; at most {MAX_TEXT_LENGTH:,}"):
        words.encode(["a", "a" * (MAX_TEXT_LENGTH + 1)])
    with pytest.raises(
        EncodingError, match=r"value 0 must be a text, but is None\. Give a missing one as an empty text"
    ):
        words.encode([None])
    with pytest.raises(EncodingError, match="value 1 must be a text, but is nan"):
        Vocabulary.observe(["a", float("nan")], max_length=3)


def word_level(unknown: str | None) -> str:
    """A tokenizer.json of three words."""
    model = tokenizers.models.WordLevel({"[UNK]": 1, "good": 2, "bad": 3}, unk_token=unknown)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return str(tokenizer.to_str())


def test_a_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(word_level("[UNK]"))
    words = Tokenizer.read(tmp_path / "tokenizer.json", max_length=4)
    assert words.encode(["good bad", "", "bad so bad so good"]).tolist() == [[2, 3, 0, 0], [0] * 4, [3, 1, 3, 1]]
    assert words.encode([]).shape == (0, 4)
    assert words.decode([2, 3, 0, 0]) == "good bad"
    assert words.size == 4
    without = Tokenizer(json=word_level(None), max_length=4)
    with pytest.raises(EncodingError, match=r"value 1 cannot be encoded: .*Missing \[UNK\]"):
        without.encode(["good", "other"])
    with pytest.raises(ConfigError, match=r"cannot read this tokenizer\.json"):
        Tokenizer(json="{}", max_length=4).encode(["x"])
    with pytest.raises(DataError, match=r"none\.json cannot be read"):
        Tokenizer.read(tmp_path / "none.json", max_length=4)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"dtype": "int64", "shape": (5,), "encoding": NOTES}, r"with Vocabulary must be int64 of the shape \(4,\)"),
        ({"dtype": "int32", "encoding": Categories({"a": 0})}, r"with Categories must be int64 of the shape \(\) or"),
        (
            {"dtype": "float32", "shape": (3,), "columns": {"a": "", "b": ""}},
            r"columns a, b must have the shape \(2,\)",
        ),
        ({"dtype": "int64", "allow_missing": True}, "allow_missing is for float inputs"),
    ],
)
def test_a_spec_that_cannot_work_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TensorSpec(**spec)


# --- The same row by every way in ---


def grpc_message(request: dict[str, Any], *, raw: bool) -> Any:
    """A request in JSON as a message: in typed contents, or in raw ones."""
    fields = {"BYTES": "bytes_contents", "FP32": "fp32_contents", "UINT8": "uint_contents", "BOOL": "bool_contents"}
    message = service_pb2.ModelInferRequest(model_name="visits")
    for tensor in request["inputs"]:
        entry = message.inputs.add(name=tensor["name"], datatype=tensor["datatype"], shape=tensor["shape"])
        data = [math.nan if value is None else value for value in tensor["data"]]
        is_text = tensor["datatype"] == "BYTES"
        if raw:
            array = text_array(data, (len(data),)) if is_text else np.asarray(data, VISIT[tensor["name"]].dtype)
            body, length = encode_binary({tensor["name"]: array})
            message.raw_input_contents.append(body[length:])
        else:
            getattr(entry.contents, fields[tensor["datatype"]]).extend(map(str.encode, data) if is_text else data)
    return message


def test_every_way_in_gives_the_model_the_same_numbers(tmp_path: Path) -> None:
    request = example_request(SPEC)
    assert {tensor["name"]: tensor["datatype"] for tensor in request["inputs"]}["note"] == "BYTES"
    found = [parse_request(SPEC, json.dumps(request).encode(), None).inputs]
    arrays = {
        tensor["name"]: text_array(tensor["data"], tuple(tensor["shape"]))
        if tensor["datatype"] == "BYTES"
        else np.asarray(tensor["data"], VISIT[tensor["name"]].dtype).reshape(tensor["shape"])
        for tensor in request["inputs"]
    }
    body, length = encode_binary(arrays)
    found.append(parse_request(SPEC, body, str(length)).inputs)
    found += [parse_message(SPEC, grpc_message(request, raw=raw)).inputs for raw in (False, True)]
    found.append(parse_rows(SPEC, json.dumps({"rows": [RECORD]}).encode()).inputs)
    assert json.loads(example_rows(SPEC)) == {"rows": [RECORD]}
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": 7, **RECORD}))
    cells = {name: "" if value is None else value for name, value in RECORD.items()}
    lines = [
        ",".join(f'"{json.dumps(value) if isinstance(value, list | bool) else value}"' for value in cells.values())
    ]
    (tmp_path / "rows.csv").write_text("\n".join([",".join(cells), *lines]))
    (tmp_path / "rows.json").write_text(
        json.dumps({**{n: [v] for n, v in VISIT_ROW.items()}, "numbers": [[39.5, math.nan]]})
    )
    found += [dict(read_rows([tmp_path / f"rows.{kind}"], SPEC).arrays) for kind in ("jsonl", "csv", "json")]
    for inputs in found:
        assert {name: inputs[name][0].tolist() for name in ENCODED} == ENCODED
        np.testing.assert_equal(inputs["numbers"], [[39.5, math.nan]])
        assert {name: array.dtype.name for name, array in inputs.items()} == {n: t.dtype for n, t in VISIT.items()}


@pytest.mark.parametrize("extra", [0, 60_000])
def test_what_is_no_text_of_the_model_is_refused(extra: int) -> None:
    """Also in a request that is so large that it is parsed in pieces."""
    many = ["Bern"] * extra
    city = only("city")
    assert ask(city, ["Bern", "Genf", "", *many], [3 + extra]).tolist() == [0, 1, 2] + [0] * extra
    for data, message in (
        (["Bern", "x\u202e"], r"input city, row 1: must be one of 'Bern', 'Genf', but is 'x\\u202e'\."),
        (["Bern", 7], "input city: data must be texts"),
        (["Bern", ["Genf"]], "input city: data must be"),
        ([["Bern"], ["Genf"]], "input city: data must be"),
        (["Bern", None], "input city: data must be texts"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            ask(city, [*data, *many], [2 + extra])
    pair = {"both": replace(SPEC.inputs["city"], shape=(2,), columns={"from": "", "to": ""})}
    both = replace(SPEC, inputs=pair, encodings={"both": SPEC.encodings["city"]}, example={})
    nested = [["Bern", "Genf"]] * (1 + extra // 2)
    assert ask(both, nested, [len(nested), 2])[-1].tolist() == [0, 1]
    with pytest.raises(InvalidRequest, match="input to, row 0: must be one of"):
        ask(both, [["Bern", "Rom"], *nested], [len(nested) + 1, 2])
    numbers = only("numbers")
    found = ask(numbers, [1.5, None] * (1 + extra), [1 + extra, 2], "FP32")
    assert (found[-1, 0], math.isnan(found[-1, 1])) == (1.5, True)
    with pytest.raises(InvalidRequest, match="numbers"):
        ask(numbers, [1.5, "x"] * (1 + extra), [1 + extra, 2], "FP32")


def test_limits_of_texts() -> None:
    note = only("note")
    with pytest.raises(InvalidRequest, match="input note, element 1: has 65,537 characters; at most 65,536"):
        ask(note, ["a", "a" * (MAX_TEXT_LENGTH + 1)], [2])
    with pytest.raises(InvalidRequest, match="at most 1,048,576 texts are allowed"):
        ask(note, ["a"], [2**21])
    with pytest.raises(InvalidRequest, match="at most 1,048,576 texts"):
        ask(note, [""] * (2**20 + 1), [1])
    with pytest.raises(InvalidRequest, match="at most 1,048,576 texts"):
        ask(note, [[]] * (2**20 + 1), [1])
    with pytest.raises(InvalidRequest, match=r"rows\[0\]: note has 65,537 characters"):
        parse_rows(SPEC, json.dumps({"rows": [{**RECORD, "note": "a" * (MAX_TEXT_LENGTH + 1)}]}).encode())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x04\0\0\0Be", "end within an element"),
        (b"\xff\xff\xff\xffBern", "end within an element"),
        (b"\x04\0\0\0Bern\x01", "1 bytes follow the last element"),
        (b"\x02\0\0\0\xff\xfe", "each element must be UTF-8"),
        (b"\x02\0", "end within an element"),
    ],
)
def test_binary_texts_that_are_damaged(content: bytes, message: str) -> None:
    entry = {"name": "city", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(content)}}
    header = json.dumps({"inputs": [entry]}).encode()
    with pytest.raises(InvalidRequest, match=message):
        parse_request(only("city"), header + content, str(len(header)))
    entry["parameters"] = {"binary_data_size": len(content) + 1}
    header = json.dumps({"inputs": [entry]}).encode()
    with pytest.raises(InvalidRequest, match=f"city has {len(content) + 1} bytes, but {len(content)} follow"):
        parse_request(only("city"), header + content, str(len(header)))


def test_an_error_in_a_table_names_line_and_column(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("age,income,city\n1,2,Bern\n,,Rom\n")
    model = replace(SPEC, inputs={name: SPEC.inputs[name] for name in ("numbers", "city")}, example={})
    model = replace(model, encodings={"city": SPEC.encodings["city"]})
    with pytest.raises(DataError, match=r"t\.csv, line 3, column city: must be one of 'Bern', 'Genf', but is 'Rom'\."):
        read_rows([tmp_path / "t.csv"], model)
    (tmp_path / "t.csv").write_text("age,salary\n1,2\n")
    with pytest.raises(DataError, match="column income: is missing; the columns are age, salary"):
        read_rows([tmp_path / "t.csv"], only("numbers"))  # not taken for income, the only input's second number
    (tmp_path / "t.csv").write_text("1,2\n3,4\n")
    assert read_rows([tmp_path / "t.csv"], only("numbers")).arrays["numbers"].tolist() == [[1, 2], [3, 4]]


def test_the_description_tells_the_truth_of_a_row() -> None:
    """What it allows is taken, and what it forbids is refused."""
    schema = describe([SPEC])["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    rows = [
        (RECORD, True),
        (VISIT_ROW, False),
        ({**RECORD, "city": ""}, True),
        ({**RECORD, "city": None, "age": None}, True),
        ({**RECORD, "mood": "elated", "other": [1]}, True),
        ({**RECORD, "mood": 3}, True),
        ({**RECORD, "note": ""}, True),
        ({**RECORD, "city": "Rom"}, False),
        ({**RECORD, "city": 3}, False),
        ({**RECORD, "mood": ""}, False),
        ({**RECORD, "mood": None}, False),
        ({**RECORD, "note": None}, True),
        ({**RECORD, "note": "a" * (MAX_TEXT_LENGTH + 1)}, False),
        ({**RECORD, "since": None}, True),
        ({**RECORD, "since": ""}, True),
        ({**RECORD, "since": "31.1.2026"}, False),
        ({**RECORD, "since": 2026}, False),
        ({**RECORD, "age": "39"}, False),
        ({**RECORD, "age": ""}, False),
        ({name: value for name, value in RECORD.items() if name != "age"}, False),
        ({name: value for name, value in RECORD.items() if name != "city"}, False),
    ]
    for row, is_valid in rows:
        document = {"rows": [row]}
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        assert validator.is_valid(document) is is_valid, row
        if is_valid:
            parse_rows(SPEC, json.dumps(document).encode())
        else:
            with pytest.raises(InvalidRequest):
                parse_rows(SPEC, json.dumps(document).encode())
    numbered = replace(only("city"), encodings={"city": Categories({"1": 0, "01": 1, "x": 2})})
    schema = describe([numbered])["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for value, is_valid in ((1, True), ("01", True), (2, False), ("2", False)):
        assert jsonschema.Draft202012Validator(schema).is_valid({"rows": [{"city": value}]}) is is_valid


# --- What a package keeps ---


@pytest.fixture
def visits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a trusted package; no test runs its program."""
    signature = InferenceSignature(module=Visit(), inputs=VISIT, outputs=SPEC.outputs)
    put_files(tmp_path, signature, b"weights", {"program.pt2": b"program"}, name="visits", example=VISIT_ROW)
    monkeypatch.setenv("PACELINE_REGISTRY", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return "visits@prod"


def test_a_category_that_is_not_taken_any_more_changes_the_signature() -> None:
    fewer = replace(SPEC, encodings={**ENCODINGS, "city": Categories({"Genf": 0, "Rom": 1}), "mood": ENCODINGS["mood"]})
    assert _signature_changes(SPEC, fewer) == ["input city no longer takes 'Bern'"]
    assert _signature_changes(fewer, SPEC) == ["input city no longer takes 'Rom'"]
    renamed = {**SPEC.inputs, "numbers": replace(SPEC.inputs["numbers"], columns={"age": "", "wage": ""})}
    assert "is FP32 [any, 2] of age, wage instead of" in _signature_changes(SPEC, replace(SPEC, inputs=renamed))[0]


def test_a_package_keeps_its_inputs_as_data(visits: str) -> None:
    package = open_package(visits)
    assert read_inputs(package).specs == VISIT
    assert list(read_inputs(package).specs["numbers"].columns) == ["age", "income"]
    assert "Bern" not in package.manifest.to_bytes().decode()
    model = open_model(visits).spec
    assert (model.inputs, model.encodings, model.example) == (SPEC.inputs, SPEC.encodings, SPEC.example)
    tensors = {name: (t.dtype, t.shape) for name, t in model.program.inputs.items()}
    assert tensors == {name: (t.dtype, t.shape) for name, t in VISIT.items()}
    tokenized = TensorSpec(dtype="int64", shape=(4,), encoding=Tokenizer(json=word_level("[UNK]"), max_length=4))
    content = PackageInputs(specs={"note": tokenized}).to_bytes()
    assert json.loads(content)["inputs"]["note"]["encoding"]["kind"] == "tokenizer"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"codes": {', '"codes": {"Rom": 1.5,', "inputs.json is invalid"),
        ('"kind": "vocabulary"', '"kind": "pickle"', "an encoding must be of categories, dates, vocabulary, tokenizer"),
        ('"max_length": 4', '"max_length": 5', r"with Vocabulary must be int64 of the shape \(5,\)"),
        ('"max_length": 4', '"max_length": 1000000000', "max_length must be between 1 and 65536"),
        ('"city": "Genf"', '"city": "Rom"', "the example in its inputs.json is invalid: city must be one of"),
        ('"city": "Genf"', '"town": "Genf"', "'town' is not an input"),
        ('"age": "years"', '"age": 3', "inputs.json is invalid"),
        ("{", "[" * 100_000, "inputs.json is invalid"),
        ("39.5,", "39.5, 1,", "the example in its inputs.json is invalid"),
        ('"numbers": [', '"numbers": 3, "hours": [', "inputs.json is invalid"),
    ],
)
def test_inputs_that_are_not_valid_are_refused(
    visits: str, monkeypatch: pytest.MonkeyPatch, old: str, new: str, message: str
) -> None:
    package = open_package(visits)
    content = package.read(INPUTS).decode().replace(old, new, 1).encode()
    monkeypatch.setattr(type(package), "read", lambda self, name: content)
    monkeypatch.setattr("paceline_serving.app.open_package", lambda place: package)
    with pytest.raises(PackageError, match=message):
        open_model(visits)


# --- A server, and clients of others ---


@pytest.fixture(scope="module")
def visits_server(tmp_path_factory: pytest.TempPathFactory, module_processes: Processes) -> Server:
    registry = tmp_path_factory.mktemp("visits")
    put_visits(registry)
    env = {"PACELINE_REGISTRY": str(registry), "XDG_CONFIG_HOME": str(registry / "config")}
    return start_server(module_processes, env, "visits@prod", "--grpc-port", "0", shared=True)


@pytest.mark.system
def test_other_clients_send_texts(visits_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert visits_server.grpc is not None
    for module, address in (
        (tritonclient.http, visits_server.url.removeprefix("http://")),
        (tritonclient.grpc, visits_server.grpc),
    ):
        with module.InferenceServerClient(address) as client:
            inputs = {}
            for tensor in httpx.get(f"{visits_server.url}/v2/models/visits/example", timeout=60).json()["inputs"]:
                inputs[tensor["name"]] = module.InferInput(tensor["name"], tensor["shape"], tensor["datatype"])
                dtype = object if tensor["datatype"] == "BYTES" else VISIT[tensor["name"]].dtype
                inputs[tensor["name"]].set_data_from_numpy(np.asarray(tensor["data"], dtype).reshape(tensor["shape"]))
            assert client.infer("visits", list(inputs.values())).as_numpy("sum").tolist() == [VISIT_SUM]
            inputs["city"].set_data_from_numpy(np.asarray(["Zürich\x1b"], object))
            with pytest.raises(
                InferenceServerException,
                match=re.escape(r"city, row 0: must be one of 'Bern', 'Genf', but is 'Zürich\x1b'"),
            ):
                client.infer("visits", list(inputs.values()))

    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"id": i, **RECORD}) for i in range(3)))
    assert (
        app(
            ["predict", visits_server.url, str(tmp_path / "t.jsonl"), "--output", str(tmp_path / "o.jsonl")],
            exit_on_error=False,
        )
        == 0
    )
    predicted = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert predicted == [{"id": i, "sum": VISIT_SUM} for i in range(3)]
    capsys.readouterr()
    assert app(["predict", visits_server.url, "--describe", "--json"], exit_on_error=False) == 0
    described = json.loads(capsys.readouterr().out)
    [given] = described["output_fields"]
    assert (given["name"], given["unit"]) == ("sum", "points")
    metadata = httpx.get(f"{visits_server.url}/v2/models/visits", timeout=60).json()
    assert metadata["parameters"]["output_fields"] == [given]
    fields = {each["name"]: each for each in described["fields"]}
    assert list(fields) == list(RECORD)
    assert (fields["age"]["unit"], fields["city"]["choices"], fields["mood"]["is_open"]) == (
        "years",
        ["Bern", "Genf"],
        True,
    )


@pytest.mark.slow
def test_another_generator_finds_no_failure_with_texts(visits_server: Server) -> None:
    assert try_schema(visits_server, 100) > 500
