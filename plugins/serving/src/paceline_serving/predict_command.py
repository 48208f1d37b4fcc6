"""``paceline predict PACKAGE|URL INPUT...``: predict with a package on this machine, or with a server."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from paceline.cli.progress import progress_bar
from paceline.core.errors import ConfigError
from paceline.core.plugins import import_library

if TYPE_CHECKING:
    from paceline_serving.batch_predict import PredictionEngine
    from paceline_serving.model import Array, InputField, ModelSpec, OutputField
    from paceline_serving.tables import Rows

Flag = Annotated[bool, Parameter(negative="")]
_MAX_SHOWN = 20
_MAX_ELEMENTS = 10  # of an output of a row that is shown
_MAX_CELL = 50  # characters of an output's elements
_MAX_PLAIN = 1e6  # above it, six digits would not show the whole part


def predict(
    model: str,
    inputs: Annotated[tuple[Path, ...], Parameter(negative="", allow_leading_hyphen=True)] = (),
    *,
    describe: Flag = False,
    output: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None,
    nproc: int = 1,
    chunk: int = 1024,
    devices: str = "cpu",
    program: Literal["auto", "pt2", "onnx"] = "auto",
    task: str = "",
    name: str | None = None,
    token_file: Path | None = None,
    json: Flag = False,
) -> int:
    """Predict INPUTS with MODEL, a package or a server's address.

    INPUTS are images, rows in .npy, .npz (arrays named like the inputs), .csv or .json, or tables with a column for
    each input: .csv, .parquet, .jsonl, or - for standard input. Other columns of a table are kept in the output.
    --describe prints the columns, types, units and ranges that MODEL takes. With --output, progress is saved: after a
    kill, the same command continues, and the result contains every row exactly once.

    Args:
        model: A package's directory or reference (fashion-mnist@prod), or http://HOST:PORT.
        inputs: Input files.
        describe: Print what a row of the model's input holds, with an example, and predict nothing.
        output: Write all predictions into this file: .npz, .jsonl, .parquet or .csv; - is standard output, in the
            format of the table that is read. Default: print them.
        nproc: Processes that predict; with a server, the number of connections.
        chunk: Rows that are predicted and saved together.
        devices: Devices of a package's processes, in turn: cpu, or cuda:0,cuda:1.
        program: Which of a package's programs to run. auto: pt2, else onnx.
        task: Use a package's weights with this task's own code.
        name: Name of the server's model. Default: its only one.
        token_file: File with the server's token.
        json: Print JSON.
    """
    for option, value in (("nproc", nproc), ("chunk", chunk)):
        if value < 1:
            raise ConfigError(f"--{option} must be at least 1, but is {value}.")
    for path in (*inputs, *([] if output is None else [output])):
        if str(path).startswith("-") and str(path) != "-":
            raise ConfigError(f"{path} is not an option. See: paceline predict --help. For a file, write ./{path}")
    is_piped = output is not None and str(output) == "-"
    if is_piped and json:
        raise ConfigError("--json and --output - both print. Leave one of them out.")
    import asyncio

    for library in ("orjson", "prometheus_client"):
        import_library(library, "paceline predict", "serve")
    from paceline_serving.app import open_model
    from paceline_serving.batch_predict import predict_all, read_rows, replicas, server
    from paceline_serving.client import Client
    from paceline_serving.model import UNBOUNDED, ServingOptions
    from paceline_serving.tables import check_columns, write

    if model.startswith(("http://", "https://")):
        with Client(model, token_file=token_file) as client:
            name = client.choose(name, "name")
            if describe:
                return _describe(name, *client.fields(name), json=json)
            spec = client.spec(name)
        engine = server(model, name, token_file, nproc)
        job: dict[str, Any] = {"model": spec.name, "version": spec.version}
    else:
        opened = open_model(model, program=program, task=task)
        spec = opened.spec
        if describe:
            return _describe(spec.name, spec.fields, spec.output_fields, json=json)
        options = ServingOptions(replicas=nproc, devices=tuple(devices.split(",")), max_queue=UNBOUNDED, exact=True)
        engine = replicas(opened, options)
        job = {"digest": opened.source.digest, "kind": opened.source.kind, "task": task}
    rows = read_rows(inputs, spec)
    if output is not None:
        check_columns(rows, str(output), rows.suffix if is_piped else output.suffix)
    with progress_bar("predicting", quiet=json) as on_rows:
        if output is not None and not is_piped:
            _write_output(output, rows, spec, engine, job, chunk, 2 * nproc, on_rows)
        else:
            outputs = asyncio.run(predict_all(rows.arrays, engine, chunk, on_rows))
    if is_piped:
        write(sys.stdout.buffer, rows.suffix, iter([outputs]), spec, rows)
        sys.stdout.flush()
    elif output is not None:
        count = len(rows.names)
        print(
            json_module.dumps({"rows": count, "output": str(output)})
            if json
            else f"{count} row{'s' * (count != 1)} in {output}."
        )
    else:
        _print(outputs, spec, rows, json=json)
    return 0


def _describe(model: str, fields: Sequence[InputField], output_fields: Sequence[OutputField], *, json: bool) -> int:
    """Print the values of a row of a model's input and of its prediction, and a CSV with an example."""
    if not fields:
        raise ConfigError(f"the server does not tell what {model} takes. Ask it: GET /v2/models/{model}")
    if json:
        described = {"fields": [asdict(field) for field in fields]}
        described["output_fields"] = [asdict(field) for field in output_fields]
        print(json_module.dumps({"model": model, **described}))
        return 0
    from paceline.core.output import Console, ListTable
    from paceline_serving.tables import csv_lines

    headings = ("name", "type", "unit", "values", "example")
    table = ListTable(*headings, folds=headings)
    for field in fields:
        example = "" if field.example is None else f"{field.example!s:.60}"
        table.add(field.name, field.type_text, field.unit, field.values_text, example)
    predicted = ListTable("prediction", "type", "unit", folds=("prediction",))
    for output in output_fields:
        predicted.add(output.name, output.type_text, output.unit)
    Console().print(table, *([predicted] if output_fields else []))
    if all(not field.shape and (field.example is not None or field.allow_missing) for field in fields):
        print("As a CSV, to which columns of your own may be added:\n")
        print(csv_lines([{field.name: field.example for field in fields}]), end="")
    return 0


def _write_output(
    output: Path,
    rows: Rows,
    spec: ModelSpec,
    engine: PredictionEngine,
    job: Mapping[str, Any],
    chunk: int,
    concurrency: int,
    on_rows: Callable[[int, int], None],
) -> None:
    import asyncio

    from paceline_serving.batch_predict import PredictionStore, fingerprint, predict_into

    job = {**job, "inputs": fingerprint(rows.arrays)}
    with PredictionStore.open(output, job, len(rows.names), chunk) as journal:
        try:
            asyncio.run(predict_into(journal, rows.arrays, engine, concurrency, on_rows))
        except* Exception as group:
            # Several chunks may fail at the same time: report the first error.
            first: BaseException = group
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from None
        journal.finish(spec, rows)


def _print(outputs: Mapping[str, Array], spec: ModelSpec, rows: Rows, *, json: bool) -> None:
    from paceline_serving.tables import records

    predictions = list(records(outputs, spec, rows, 0))
    if json:
        print(json_module.dumps({"model": spec.name, "version": spec.version, "predictions": predictions}))
        return
    from paceline.core.inference import name_with_unit
    from paceline.core.output import Console, ListTable

    labelled = spec.label is not None
    outputs_shown = [name_with_unit(name, tensor.unit) for name, tensor in spec.outputs.items()]
    columns = ("row", *(("label", "probability") if labelled else outputs_shown))
    table = ListTable(*columns, folds=columns)
    for record in predictions[:_MAX_SHOWN]:
        if labelled:
            probability = record.get("probability", record.get("label_probability"))
            cells = [
                str(record.get("label", record.get("label_name"))),
                "" if probability is None else f"{probability:.4f}",
            ]
        else:
            cells = [_show(value) for value in record["outputs"].values()]
        table.add(record["source"], *cells)
    console = Console()
    console.print(table)
    if len(predictions) > _MAX_SHOWN:
        console.print(
            f"and {len(predictions) - _MAX_SHOWN} more; --json or --output FILE gives all of them.", style="dim"
        )


def _show(value: Any) -> str:
    """Return an output's value with the digits that people read; the files have all."""
    if isinstance(value, list):
        shown = list(map(_show, value[:_MAX_ELEMENTS]))
        while len(shown) > 1 and len(", ".join(shown)) > _MAX_CELL:
            shown.pop()  # a number that is cut is another number
        return f"[{', '.join([*shown, *(['...'] if len(shown) < len(value) else [])])}]"
    return f"{value:.6g}" if isinstance(value, float) and abs(value) < _MAX_PLAIN else f"{value!s:.60}"
