"""The model card: what a person reads of a package first."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from paceline.inference import TensorSpec
from paceline.packages.manifest import Manifest
from paceline.task import Task


def model_card(manifest: Manifest, task: Task) -> str:
    """A page of Markdown, from what the manifest says and the task's docstring.

    The parts follow Mitchell et al., "Model Cards for Model Reporting" (https://arxiv.org/abs/1810.03993).
    """
    origin = manifest.provenance
    summary = (inspect.getdoc(type(task)) or "").partition("\n")[0].strip()
    if summary.startswith(f"{type(task).__name__}("):  # what dataclass writes where there is none
        summary = ""
    split = origin.data.get("compared_split", "test")
    parts = [
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
        _table(
            ("metric", "value"), [(name, f"{value:.6g}") for name, value in sorted(manifest.metrics.items())]
        ),
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
            "metrics above are those "
            "before that."
        )
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
                *((f"data: {name}", str(value)) for name, value in sorted(origin.data.items())),
                *((name, version) for name, version in sorted(origin.versions.items())),
            ],
        ),
        "Hyperparameters: "
        + (", ".join(f"{name} = {value}" for name, value in sorted(origin.fields.items())) or "none")
        + ".",
        "## Limits",
        "The numbers hold for data like that of the split named above, and for nothing else.",
    ]
    return "\n\n".join(parts) + "\n"


def _shape(spec: TensorSpec) -> str:
    return "(" + ", ".join(["batch", *("any" if size is None else str(size) for size in spec.shape)]) + ")"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
