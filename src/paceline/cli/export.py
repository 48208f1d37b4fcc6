"""``paceline export RUN``: write a run's model as a package that is served without user code."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from paceline.core.standard_streams import escape_controls

if TYPE_CHECKING:
    from paceline.export.export import ExportedDirectory, ExportRequest
    from paceline.runs.package import Package


def export(
    run: Path,
    *,
    checkpoint: str | None = None,
    format: Annotated[
        tuple[Literal["safetensors", "pt2", "onnx", "hf", "peft"], ...],
        Parameter(consume_multiple=True, negative="", show_default=" ".join),
    ] = ("safetensors", "pt2"),
    quantize: Literal["int8", "bf16"] | None = None,
    name: str | None = None,
    tag: str | None = None,
    merge: Annotated[bool, Parameter(negative="")] = False,
    output: Path | None = None,
    tolerance: float | None = None,
    task: str = "",
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Export the model of RUN as a package into the registry, after comparing it with the trained model.

    A package holds the weights, the inputs and outputs, labels, metrics, provenance and a model card. The
    SHA-256 of its content identifies it, and NAME@TAG refers to it. Every format's outputs are compared with
    the trained model's on the test split; if they differ too much, nothing is exported.

    With --format hf or peft, the model becomes a directory that transformers or peft loads, outside the registry.

    Args:
        run: The run's directory.
        checkpoint: best, last or a step. Default: the best, else the last.
        format: Contents in addition to the weights: pt2 runs without the task's code, onnx without torch. Or alone:
            hf, the whole model and its tokenizer for transformers, vLLM and TRL; peft, the adapters of --lora.
        quantize: Keep weight matrices as int8 (a quarter of the size) or bf16 (half).
        name: The package's name. Default: the task's.
        tag: Point NAME@TAG at this package. Default: latest.
        merge: Make adapters of --lora part of the weights, as every format but peft does without being asked.
        output: The directory of hf or peft. Default: of that name, in RUN.
        tolerance: Largest difference of an output. Default: 0.0001 of the largest output; with --quantize, 99 % (int8)
            or 99.5 % (bf16) of the labels must be equal.
        task: Where the task is now (file.py:Name), if not where the run's training found it.
        json: Print one JSON object: the package's directory, digest, reference and differences.
    """
    from paceline.core.built_in import DIRECTORY_FORMATS
    from paceline.core.errors import ConfigError
    from paceline.core.plugins import import_object
    from paceline.export.export import ExportRequest
    from paceline.export.export import export as export_run
    from paceline.runs.package_registry import LATEST, Registry

    request = ExportRequest(
        run=run,
        checkpoint=checkpoint,
        formats=format,
        quantization=quantize,
        name=name,
        tag=tag or LATEST,
        tolerance=tolerance,
        task=task,
    )
    if not DIRECTORY_FORMATS.keys().isdisjoint(format):
        if name is not None or tag is not None:
            raise ConfigError("--name and --tag are of packages in the registry. Name a directory with --output.")
        if merge and "peft" in format:
            raise ConfigError("--format peft is the adapters alone. Type --format hf --merge for the merged model.")
        if len(format) > 1:
            raise ConfigError(f"--format {' '.join(format)}: hf and peft are directories. Export each alone.")
        return _export_directory(import_object(DIRECTORY_FORMATS[format[0]]), request, output, json)
    if output is not None:
        raise ConfigError("--output is for --format hf or peft; a package goes into the registry. Leave it out.")
    with _progress(json) as (on_stage, on_progress):
        package, reference = export_run(request, Registry.of_user(), on_stage, on_progress)
    if json:
        print(json_module.dumps({**as_json(package), "reference": str(reference)}))
    else:
        print_package(package, str(reference))
    return 0


def _export_directory(
    export_as: Callable[..., ExportedDirectory], request: ExportRequest, output: Path | None, json: bool
) -> int:
    from dataclasses import asdict

    with _progress(json) as (on_stage, _):
        exported = export_as(request, output, on_stage)
    text = (
        f"{exported.directory}: step {exported.step} of {exported.run}, as {exported.format}\n"
        f"largest difference of an output: {exported.difference.largest:.3g}, on {exported.difference.samples} samples "
        f"of {exported.split}"
    )
    print(json_module.dumps(asdict(exported)) if json else text)
    return 0


def as_json(package: Package) -> dict[str, Any]:
    """Return a package's location, digest and manifest as JSON types."""
    return {
        "package": str(package.path),
        "digest": package.digest,
        "manifest": json_module.loads(package.manifest.to_bytes()),
    }


def print_package(package: Package, title: str) -> None:
    """Print a package's provenance, metrics and formats."""
    from rich.filesize import decimal

    from paceline.core.output import ListTable, wide_console

    manifest = package.manifest
    console = wide_console()
    console.print(title, style="bold", markup=False)
    rows = {
        "package": str(package.path),
        "digest": package.digest,
        "task": manifest.provenance.task,
        "run": f"{manifest.provenance.run}, step {manifest.provenance.step}",
        "metrics": ", ".join(f"{name} {value:.4g}" for name, value in manifest.metrics.items()),
        "quantized": ", ".join(filter(None, (manifest.quantization, manifest.quantized_size))) or "no",
        **({} if manifest.inferred_signature is None else {"signature": f"inferred: {manifest.inferred_signature}"}),
    }
    for name, value in rows.items():  # foreign text must not look like a row
        console.print(f"  {name:<10}{escape_controls(value)}", markup=False, soft_wrap=True)
    table = ListTable("format", "file", ">size", ">difference", ">equal labels", ">samples")
    for kind, difference in manifest.differences.items():
        file = manifest.programs.get(kind, manifest.weights)
        equal = "" if difference.equal_labels is None else f"{difference.equal_labels:.2%}"
        size = decimal(manifest.files[file].size)
        table.add(kind, file, size, f"{difference.largest:.3g}", equal, f"{difference.samples:,}")
    console.print(table)


@contextmanager
def _progress(quiet: bool) -> Iterator[tuple[Callable[[str], None], Callable[[int, int], None]]]:
    """Show on a terminal the current stage and the number of samples compared; prints of others go to stderr."""
    if quiet or not sys.stderr.isatty():
        with redirect_stdout(sys.stderr):
            yield (lambda stage: None), (lambda done, total: None)
        return
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

    from paceline.core.output import Console

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as progress, redirect_stdout(sys.stderr):
        task = progress.add_task("", total=None)
        yield (
            lambda stage: progress.update(task, description=escape(stage)),
            lambda done, total: progress.update(task, completed=done, total=total),
        )
