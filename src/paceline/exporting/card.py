"""The model card: what a person reads of a package first."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence

from paceline.exporting.source import EVALUATION, INTERVALS, PACKAGE_METRICS
from paceline.inference import TensorSpec
from paceline.packages.manifest import Manifest
from paceline.task import Task

_SHOWN_ELSEWHERE = (INTERVALS, PACKAGE_METRICS, EVALUATION)


def model_card(manifest: Manifest, task: Task) -> str:
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
        parts.append(
            "Classes: " + ", ".join(f"{number} {label}" for number, label in enumerate(manifest.labels)) + "."
        )
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


def _metadata(manifest: Manifest) -> str:
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


def _own_metrics(manifest: Manifest) -> Mapping[str, float]:
    """Of the weights as they are in the package."""
    found: Mapping[str, float] = manifest.provenance.data.get(PACKAGE_METRICS, manifest.metrics)
    return found


def _metrics(manifest: Manifest) -> str:
    intervals, own = manifest.provenance.data.get(INTERVALS, {}), _own_metrics(manifest)
    quantized = own is not manifest.metrics
    rows = []
    for name, value in sorted(manifest.metrics.items()):
        found = intervals.get(name)
        between = f"{found['low']:.4g} to {found['high']:.4g} ({found['method']})" if found else ""
        rows.append((name, f"{value:.6g}", between, *([f"{own[name]:.6g}"] if quantized else [])))
    return _table(("metric", "value", "95 % interval", *(["this package's"] if quantized else [])), rows)


def _use(manifest: Manifest) -> str:
    spec = next(iter(manifest.inputs.values()))
    zeros = ", ".join("1" if size is None else str(size) for size in (1, *spec.shape))
    name = manifest.name
    inputs = ", ".join(f"{key}={value.dtype}" for key, value in manifest.inputs.items())
    lines = [
        f"With the package in a registry, as `{name}` (its inputs: {inputs}):",
        f"```console\n$ paceline serve {name}\n$ paceline predict {name} FILE\n$ paceline check {name}\n```",
    ]
    if "onnx" in manifest.programs and len(manifest.inputs) == 1:
        lines.append(
            "```python\n"
            "import numpy, onnxruntime\n"
            "from paceline.packages.package import open_package\n\n"
            f'package = open_package("{name}")\n'
            'session = onnxruntime.InferenceSession(package.read_program("onnx"))\n'
            f'x = numpy.zeros(({zeros}), dtype="{spec.dtype}")\n'
            f"outputs = session.run(None, {{{next(iter(manifest.inputs))!r}: x}})\n"
            "```"
        )
    return "\n\n".join(lines)


def _limits(manifest: Manifest) -> str:
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
