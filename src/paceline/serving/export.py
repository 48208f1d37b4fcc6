"""From a trained run to a package."""

from __future__ import annotations

import hashlib
import inspect
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline import __version__
from paceline.core.errors import ConfigError, ExportError
from paceline.core.inference import InferenceSignature, TensorSpec
from paceline.core.stats import Estimate
from paceline.core.task import Task
from paceline.runs.checkpoint_manifest import FileRecord, write_file
from paceline.runs.checkpoint_state import model_sha256
from paceline.runs.package import Package, trust, verify_package
from paceline.runs.package_manifest import FormatDifference, PackageManifest, Provenance, plain_name
from paceline.runs.package_registry import LATEST, PackageReference, Registry
from paceline.serving.equivalence import OnProgress, batch_inputs, compare, layer_at_fault, problem_of
from paceline.serving.formats import (
    PROGRAM_FILES,
    Compute,
    Quantization,
    capture,
    layer_alone,
    load_onnx,
    load_pt2,
    load_weights,
    quantize,
    require_onnx,
    save_onnx,
    save_pt2,
    weights_bytes,
)
from paceline.serving.trained_source import (
    EVALUATION,
    INTERVALS,
    PACKAGE_METRICS,
    TrainedSource,
    inference_of,
    open_source,
    source_sha256,
)

# --- The model card: what a person reads of a package first ---


_SHOWN_ELSEWHERE = (INTERVALS, PACKAGE_METRICS, EVALUATION)


def model_card(manifest: PackageManifest, task: Task) -> str:
    """A page of Markdown, from what the manifest says and the task's docstring.

    The parts follow Mitchell et al., "Model Cards for Model Reporting" (https://arxiv.org/abs/1810.03993);
    the metadata before them, Hugging Face's (https://huggingface.co/docs/hub/model-cards).
    """
    origin = manifest.provenance
    summary = (inspect.getdoc(type(task)) or "").partition("\n")[0].strip()
    if summary.startswith(f"{type(task).__name__}("):  # what dataclass writes where there is none
        summary = ""
    split = origin.data.get("compared_split", "test")
    parts = [
        _metadata(manifest),
        f"# {manifest.name}",
        *([summary] if summary else []),
        f"Trained with Paceline {origin.versions['paceline']} and torch {origin.versions['torch']} "
        f"for {origin.step:,} "
        f"steps; exported {manifest.created}.",
        "## Inputs and outputs",
        "The first dimension is the batch, of any size.",
        _table(
            ("", "name", "type", "shape"),
            [("input", name, spec.dtype, _shape(spec)) for name, spec in manifest.inputs.items()]
            + [("output", name, spec.dtype, _shape(spec)) for name, spec in manifest.outputs.items()],
        ),
    ]
    if manifest.labels:
        parts.append("Classes: " + ", ".join(f"{number} {label}" for number, label in enumerate(manifest.labels)) + ".")
    parts += [
        "## Evaluation",
        f"The trained model on the {split} split:",
        _metrics(manifest),
        "What is in this package, against the trained model, on the same samples:",
        _table(
            ("format", "largest difference of an output", "equal labels", "samples"),
            [
                (
                    kind,
                    f"{difference.largest:.3g}",
                    "" if difference.equal_labels is None else f"{difference.equal_labels:.2%}",
                    f"{difference.samples:,}",
                )
                for kind, difference in manifest.differences.items()
            ],
        ),
    ]
    if manifest.quantization is not None:
        parts.append(
            f"Weights are kept as {manifest.quantization}, and widened where they are used. The "
            "package's own metrics are those of these weights."
        )
    parts += ["## Use", _use(manifest)]
    parts += [
        "## Where it comes from",
        _table(
            ("", ""),
            [
                ("task", f"`{origin.task}`"),
                ("run", f"`{origin.run}`"),
                ("checkpoint", f"step {origin.step}, state version {origin.state_version}"),
                ("model SHA-256", f"`{origin.model_sha256}`"),
                ("code SHA-256", "unknown" if origin.code_sha256 is None else f"`{origin.code_sha256}`"),
                *(
                    (f"data: {name}", str(value))
                    for name, value in sorted(origin.data.items())
                    if name not in _SHOWN_ELSEWHERE
                ),
                *((name, version) for name, version in sorted(origin.versions.items())),
            ],
        ),
        "Hyperparameters: "
        + (", ".join(f"{name} = {value}" for name, value in sorted(origin.fields.items())) or "none")
        + ".",
        "## Limits",
        _limits(manifest),
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(manifest: PackageManifest) -> str:
    """Before the text, between lines of dashes; every text is in quotes, as JSON's are YAML's too."""
    origin = manifest.provenance
    dataset = json.dumps(origin.task.rpartition(":")[2] or origin.task)
    lines = ["---", "library_name: paceline", f"tags: {json.dumps(['paceline', *manifest.programs])}"]
    if manifest.metrics:
        lines += [
            "model-index:",
            f"- name: {json.dumps(manifest.name)}",
            "  results:",
            "  - task:",
            "      type: other",
            "    dataset:",
            f"      name: {dataset}",
            f"      type: {dataset}",
            f"      split: {json.dumps(origin.data.get('compared_split', 'test'))}",
            "    metrics:",
        ]
    for name, value in sorted(_own_metrics(manifest).items()):
        lines += [f"    - type: {json.dumps(name)}", f"      value: {value!r}"]
    return "\n".join([*lines, "---"])


def _own_metrics(manifest: PackageManifest) -> Mapping[str, float]:
    """Of the weights as they are in the package."""
    found: Mapping[str, float] = manifest.provenance.data.get(PACKAGE_METRICS, manifest.metrics)
    return found


def _metrics(manifest: PackageManifest) -> str:
    intervals, own = manifest.provenance.data.get(INTERVALS, {}), _own_metrics(manifest)
    quantized = own is not manifest.metrics
    rows = []
    for name, value in sorted(manifest.metrics.items()):
        found = intervals.get(name)
        between = f"{found['low']:.4g} to {found['high']:.4g} ({found['method']})" if found else ""
        rows.append((name, f"{value:.6g}", between, *([f"{own[name]:.6g}"] if quantized else [])))
    return _table(("metric", "value", "95 % interval", *(["this package's"] if quantized else [])), rows)


def _use(manifest: PackageManifest) -> str:
    spec = next(iter(manifest.inputs.values()))
    zeros = ", ".join("1" if size is None else str(size) for size in (1, *spec.shape))
    name = manifest.name
    inputs = ", ".join(f"{key}={value.dtype}" for key, value in manifest.inputs.items())
    lines = [
        f"With the package in a registry, as `{name}` (its inputs: {inputs}):",
        f"```console\n$ paceline serve {name}\n$ paceline predict {name} FILE\n$ paceline revalidate {name}\n```",
    ]
    if "onnx" in manifest.programs and len(manifest.inputs) == 1:
        lines.append(
            "```python\n"
            "import numpy, onnxruntime\n"
            "from paceline.runs.package import open_package\n\n"
            f'package = open_package("{name}")\n'
            'session = onnxruntime.InferenceSession(package.read_program("onnx"))\n'
            f'x = numpy.zeros(({zeros}), dtype="{spec.dtype}")\n'
            f"outputs = session.run(None, {{{next(iter(manifest.inputs))!r}: x}})\n"
            "```"
        )
    return "\n\n".join(lines)


def _limits(manifest: PackageManifest) -> str:
    samples = max((difference.samples for difference in manifest.differences.values()), default=0)
    split = manifest.provenance.data.get("compared_split", "test")
    return (
        f"The numbers hold for data like the {samples:,} samples of the {split} split, and for nothing else: "
        "not for other sources, and not for each group among them. An interval says how much they would vary "
        "with other samples of that kind, and not with another training. Who deploys the model answers for "
        "what it is used for."
    )


def _shape(spec: TensorSpec) -> str:
    return "(" + ", ".join(["batch", *("any" if size is None else str(size) for size in spec.shape)]) + ")"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


# --- One export: from a run's checkpoint to a package in the registry, refused where a format computes else


WEIGHTS = "weights.safetensors"
CARD = "README.md"
FORMATS = ("safetensors", "pt2", "onnx")


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What is to be exported, and how.

    Attributes:
        run: the run's directory.
        checkpoint: "best", "last", a step, or None for the best where there is one.
        formats: of "safetensors", "pt2", "onnx"; the weights are always exported.
        quantization: "int8", "bf16" or None.
        name: of the package; None follows from the task's.
        tag: that means the package from now on.
        tolerance: what outputs may differ by; None is by quantization.
    """

    run: Path
    checkpoint: str | None = None
    formats: Sequence[str] = ("safetensors", "pt2")
    quantization: Quantization | None = None
    name: str | None = None
    tag: str = LATEST
    tolerance: float | None = None


def export(
    request: ExportRequest,
    registry: Registry,
    on_stage: Callable[[str], None] = lambda stage: None,
    on_progress: OnProgress = lambda done, total: None,
) -> tuple[Package, PackageReference]:
    """Export a run's model into a registry; nothing is left there where it is refused.

    Args:
        request: what is asked for.
        registry: takes the package.
        on_stage: told what begins.
        on_progress: told how many samples are compared, of how many.

    Raises:
        UserError: run, checkpoint, task or options cannot work.
        ExportError: a format cannot be written, or computes something else than the trained model.
    """
    if unknown := set(request.formats) - set(FORMATS):
        raise ConfigError(f"--format must be of {', '.join(FORMATS)}, but is {min(unknown)!r}.")
    if request.tolerance is not None and not 0 <= request.tolerance < float("inf"):
        raise ConfigError(f"--tolerance must be a number from 0, but is {request.tolerance}.")
    if request.name is not None:
        plain_name(request.name, "--name")
    plain_name(request.tag, "--tag")
    if "onnx" in request.formats:
        require_onnx()
    on_stage("reading the run")
    with open_source(request.run, request.checkpoint) as source, registry.draft() as draft:
        reference = PackageReference(request.name or default_name(source), request.tag)
        on_stage(f"evaluating {source.split}")
        measured = source.measure()
        weights = _write_weights(source, request.quantization, draft)
        model, reloaded = _reloaded(source, weights, request.quantization)
        computes = {
            "safetensors": _as_compute(reloaded),
            **_write_programs(source, reloaded, request.formats, draft, on_stage),
        }
        on_stage("comparing")
        compared = compare(source, computes, on_progress)
        for kind, (difference, scale) in compared.items():
            problem = problem_of(difference, scale, request.quantization, request.tolerance)
            if problem is not None:
                raise _refusal(source, reloaded, kind, problem, request)
        differences = {kind: difference for kind, (difference, _) in compared.items()}
        data = {**source.data, INTERVALS: _intervals(measured)}
        if request.quantization is not None:
            on_stage(f"evaluating {source.split}, {request.quantization}")
            data[PACKAGE_METRICS] = _finite(source.measure(model))
        manifest = _manifest(source, request, reference.name, _finite(measured), differences, data, draft)
        registry.commit(draft, manifest)
    # What this user exported here may run here.
    trust(manifest.digest)
    registry.put_tag(reference, manifest.digest)
    return verify_package(registry.path_of(manifest.digest)), reference


def default_name(source: TrainedSource) -> str:
    """A recipe's own name, or the task's class in small letters."""
    spec = source.spec.rpartition(":")[2] or source.spec
    letters = (c if c.isalnum() and c.isascii() else "-" for c in spec.lower())
    return "".join(letters).strip("-")[:64].strip("-") or "model"


def _write_weights(source: TrainedSource, quantization: Quantization | None, draft: Path) -> bytes:
    model = source.model
    if quantization is not None:
        model = deepcopy(model)
        quantize(model, quantization)
    content = weights_bytes(model)
    write_file(draft / WEIGHTS, [content])
    return content


def _reloaded(
    source: TrainedSource, weights: bytes, quantization: Quantization | None
) -> tuple[nn.Module, InferenceSignature]:
    """Model and function as somebody gets them who has the weights and the task."""
    model = source.task.build_model().eval().requires_grad_(False)
    load_weights(model, weights, quantization)
    return model, inference_of(source.task, model)


def _as_compute(inference: InferenceSignature) -> Compute:
    def compute(inputs: Sequence[Tensor]) -> Mapping[str, Tensor]:
        with torch.no_grad():
            outputs: Mapping[str, Tensor] = inference.module(*inputs)
        return outputs

    return compute


def _write_programs(
    source: TrainedSource,
    reloaded: InferenceSignature,
    formats: Sequence[str],
    draft: Path,
    on_stage: Callable[[str], None],
) -> dict[str, Compute]:
    """Write the programs that were asked for; each as it is read back from its file."""
    wanted = [kind for kind in PROGRAM_FILES if kind in formats]
    if not wanted:
        return {}
    on_stage("tracing")
    batches = source.batches()
    try:
        batch = next(iter(batches.read(range(1))))
    finally:
        batches.close()
    program = capture(reloaded, batch_inputs(source, batch.batch))
    computes: dict[str, Compute] = {}
    for kind in wanted:
        on_stage(f"writing {kind}")
        path = draft / PROGRAM_FILES[kind]
        if kind == "pt2":
            save_pt2(program, path)
            computes[kind] = load_pt2(path.read_bytes())
        else:
            save_onnx(program, list(reloaded.inputs), list(reloaded.outputs), path)
            beside = {p.name: p.read_bytes() for p in draft.glob(f"{path.name}.*")}
            computes[kind] = load_onnx(path.read_bytes(), list(reloaded.outputs), beside)
    return computes


def _refusal(
    source: TrainedSource, reloaded: InferenceSignature, kind: str, problem: str, request: ExportRequest
) -> ExportError:
    quantization = request.quantization
    layer = layer_at_fault(
        source,
        lambda name, given: layer_alone(reloaded.module.get_submodule(name), kind, given),
        quantization,
        request.tolerance,
    )
    where = layer or (
        "no layer differs by itself, so it is what lies between them, or the function gives something else each time"
    )
    advice = (
        "Leave --quantize out, or take bf16"
        if quantization == "int8"
        else "Leave --quantize out"
        if quantization
        else "A layer must depend on its inputs and its state_dict only: no random numbers, no counters in Python"
    )
    return ExportError(
        f"the {kind} export computes something else than the trained model on the {source.split} split: "
        f"{problem}; {where}. {advice}; or say with --tolerance what may differ. Nothing was exported."
    )


def _manifest(
    source: TrainedSource,
    request: ExportRequest,
    name: str,
    metrics: Mapping[str, float],
    differences: Mapping[str, FormatDifference],
    data: Mapping[str, Any],
    draft: Path,
) -> PackageManifest:
    inference = source.inference
    manifest = PackageManifest(
        name=name,
        created=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        inputs=inference.inputs,
        outputs=inference.outputs,
        provenance=_provenance(source, data),
        files={},
        labels=inference.labels,
        probabilities=inference.probabilities,
        label=inference.label,
        metrics=metrics,
        weights=WEIGHTS,
        programs={kind: PROGRAM_FILES[kind] for kind in differences if kind in PROGRAM_FILES},
        quantization=request.quantization,
        differences=differences,
    )
    write_file(draft / CARD, [model_card(manifest, source.task).encode()])
    files = {path.name: _record(path) for path in sorted(draft.iterdir())}
    return replace(manifest, files=files)


def _finite(measured: Mapping[str, Estimate]) -> dict[str, float]:
    return {name: found.value for name, found in measured.items() if abs(found.value) < 1e300}


def _intervals(measured: Mapping[str, Estimate]) -> dict[str, Any]:
    return {
        name: {"low": found.low, "high": found.high, "method": found.method}
        for name, found in measured.items()
        if found.low is not None and found.high is not None and abs(found.high) + abs(found.low) < 1e300
    }


def _provenance(source: TrainedSource, data: Mapping[str, Any]) -> Provenance:
    return Provenance(
        run=str(source.manifest["id"]),
        task=source.spec,
        fields=source.fields,
        step=source.step,
        state_version=source.state_version,
        model_sha256=model_sha256(source.model.state_dict()),
        data=data,
        versions={
            "paceline": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        code_sha256=source_sha256(source.task),
    )


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(path.stat().st_size, digest)
