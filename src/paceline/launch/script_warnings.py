"""Warnings about a script that would train apart, or fail, under a launcher; found in its source, before it starts."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from paceline.core.launch_spec import LaunchSpec

_LEGACY_KERAS = "TF_USE_LEGACY_KERAS"


def script_warnings(spec: LaunchSpec) -> Iterator[str]:
    """Yield what is wrong with the script of a job, and the remedy."""
    script = next((word for word in spec.command[:3] if word.endswith(".py")), None)
    if script is None:
        return
    try:
        source = Path(script).read_bytes()
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):  # the script's own process says so
        return
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if spec.world_size > 1 and _imports_lightning(tree) and any(map(_is_trainer_without_devices, calls)):
        yield (
            f"{script} calls Lightning's Trainer() without devices: each of the {spec.world_size} processes may "
            f"train a copy by itself. Give it the processes of a node: Trainer(devices={max(spec.nproc)}, "
            f"num_nodes={spec.nodes[0]})."
        )
    names = {_name(call) for call in calls}
    if spec.env_style == "tensorflow" and {"MultiWorkerMirroredStrategy", "fit"} <= names:
        has_keras_2 = _LEGACY_KERAS in {**os.environ, **spec.env}
        has_keras_2 = has_keras_2 or _LEGACY_KERAS.encode() in source or b"tf_keras" in source
        version = _version("keras")
        if not has_keras_2 and version is not None and int(version.partition(".")[0]) >= 3:
            yield (
                f"{script} calls fit() under MultiWorkerMirroredStrategy, which fails with Keras {version}. Install "
                f"tf_keras and give --env {_LEGACY_KERAS}=1."
            )


def _imports_lightning(tree: ast.Module) -> bool:
    modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return any(module.partition(".")[0] in ("lightning", "pytorch_lightning") for module in modules)


def _name(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _is_trainer_without_devices(call: ast.Call) -> bool:
    # `**options` may have them.
    return _name(call) == "Trainer" and not {"devices", None} & {keyword.arg for keyword in call.keywords}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
