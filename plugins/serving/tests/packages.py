"""Packages of models that nobody trained: what is served does not matter to who serves it."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from paceline.core.inference import InferenceSignature
from paceline.core.task_loading import build_task, load_task_class
from paceline.runs.checkpoint_manifest import FileRecord
from paceline.runs.package import trust
from paceline.runs.package_manifest import PackageManifest, Provenance
from paceline.runs.package_registry import PackageReference, Registry
from paceline_serving.model import INPUTS, PackageInputs


def put(registry: Path, recipe: str, *, name: str, seed: int = 0, tag: str = "prod") -> Path:
    """Build a recipe's model, export it into ``registry``, tag and trust it; returns its directory."""
    torch.manual_seed(seed)
    task = build_task(load_task_class(recipe), {})
    model = task.build_model().eval()
    inference = task.inference_signature(model)
    assert inference is not None
    module = inference.module.eval()
    return put_module(registry, inference, module, save(dict(model.state_dict())), name=name, task=recipe, tag=tag)


def put_module(
    registry: Path,
    inference: InferenceSignature,
    module: torch.nn.Module,
    weights: bytes,
    *,
    name: str,
    task: str = "",
    tag: str = "prod",
    example: Mapping[str, Any] | None = None,
) -> Path:
    """The same of any module; ``example`` is a row by input."""
    batch = torch.export.Dim.DYNAMIC
    examples, dynamic = [], []
    for spec in inference.inputs.values():
        shape = [8 if size is None else size for size in spec.shape]
        examples.append(torch.zeros((4, *shape), dtype=getattr(torch, spec.dtype)))
        dynamic.append({0: batch, **{i + 1: batch for i, size in enumerate(spec.shape) if size is None}})
    with torch.no_grad():
        program = torch.export.export(module, tuple(examples), dynamic_shapes=tuple(dynamic))
    stream = io.BytesIO()
    torch.export.save(program, stream)
    programs = {"program.pt2": stream.getvalue()}
    return put_files(registry, inference, weights, programs, name=name, task=task, tag=tag, example=example)


def put_files(
    registry: Path,
    inference: InferenceSignature,
    weights: bytes,
    programs: dict[str, bytes],
    *,
    name: str,
    task: str = "",
    tag: str = "prod",
    example: Mapping[str, Any] | None = None,
) -> Path:
    """The same of weights, and of programs that somebody has made."""
    files = {"weights.safetensors": weights, **programs}
    if example is not None:
        files[INPUTS] = PackageInputs(specs=inference.inputs, example=example).to_bytes()
    manifest = PackageManifest(
        name=name,
        created="2026-01-01T00:00:00+00:00",
        inputs=inference.inputs,
        outputs=inference.outputs,
        provenance=Provenance(
            run="none",
            task=task,
            fields={},
            step=0,
            state_version=0,
            model_sha256=hashlib.sha256(weights).hexdigest(),
            data={},
            versions={"torch": torch.__version__},
        ),
        files={
            file: FileRecord(sha256=hashlib.sha256(content).hexdigest(), size=len(content))
            for file, content in files.items()
        },
        labels=inference.labels,
        probabilities=inference.probabilities,
        label=inference.label,
        programs={file.rpartition(".")[2]: file for file in programs},
    )
    home = Registry(registry)
    with home.draft() as draft:
        for file, content in files.items():
            (draft / file).write_bytes(content)
        digest = home.commit(draft, manifest)
    home.put_tag(PackageReference(name, tag), digest)
    configured = os.environ.get("XDG_CONFIG_HOME")
    os.environ["XDG_CONFIG_HOME"] = str(registry / "config")
    try:
        trust(digest)
    finally:
        if configured is None:
            del os.environ["XDG_CONFIG_HOME"]
        else:
            os.environ["XDG_CONFIG_HOME"] = configured
    return home.path_of(digest)
