"""Warnings about a script that would train apart, or fail, under a launcher; found in its source, before it starts."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from paceline.core.environment import visible_gpus
from paceline.core.job import LaunchSpec
from paceline.launch.launcher import LOCAL_LAUNCHERS

_LEGACY_KERAS = "TF_USE_LEGACY_KERAS"
_ACCELERATE_USE_CPU = "ACCELERATE_USE_CPU"
_ACCELERATE_TRUE = ("y", "yes", "t", "true", "on", "1")
_OTHER_DEVICES = ("kfd", "accel*", "davinci*", "neuron*")
"""The files in /dev of AMD's, Intel's and Google's, Huawei's, and Amazon's devices, on which Accelerate finds ranks."""


def script_warnings(spec: LaunchSpec, on: str) -> Iterator[str]:
    """Yield what is wrong with the script of a job, and the remedy."""
    script = next((word for word in spec.command[:3] if word.endswith(".py")), None)
    if script is None:
        return
    try:
        source = Path(script).read_bytes()
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):  # the script's own process says so
        return
    calls = [part for part in ast.walk(tree) if isinstance(part, ast.Call)]
    imported = set(_imported_packages(tree))
    copies = f"each of the {spec.world_size} processes may train a copy by itself"
    if spec.world_size > 1 and imported & {"lightning", "pytorch_lightning", "lightning_fabric"}:
        processes = f"devices={max(spec.nproc)}, num_nodes={spec.nodes[0]}"
        if any(_is_without_devices(call, "Trainer") for call in calls):
            yield (
                f"{script} calls Lightning's Trainer() without devices: {copies}. Give it the processes of a node: "
                f"Trainer({processes})."
            )
        has_devices = "LT_DEVICES" in {**os.environ, **spec.env}
        if not has_devices and any(_is_without_devices(call, "Fabric") for call in calls):
            nodes = f" --env LT_NUM_NODES={spec.nodes[0]}" if spec.nodes[0] > 1 else ""
            yield (
                f"{script} calls Lightning's Fabric() without devices: {copies}. Give it the processes of a node: "
                f"Fabric({processes}); or, as fabric run does, --env LT_CLI_USED=1 --env LT_DEVICES={max(spec.nproc)}"
                f"{nodes}."
            )
    # On this node its GPUs are known.
    is_local = on in LOCAL_LAUNCHERS or (on in ("mpi", "horovod") and spec.nodes[1] == 1)
    if spec.world_size > 1 and is_local and imported & {"accelerate", "transformers", "trl"}:
        has_word = any("cpu" in word for word in spec.command[spec.command.index(script) + 1 :])
        call = next((call for call in calls if _is_without_cpu(call, has_word=has_word)), None)
        uses_cpu = {**os.environ, **spec.env}.get(_ACCELERATE_USE_CPU, "").lower() in _ACCELERATE_TRUE
        if call is not None and not uses_cpu and not _has_devices():
            yield (
                f"{script} calls {_name(call)}() without {_CPU_ARGUMENTS[_name(call)]}=True, and there is no GPU here: "
                f"{copies}, as Accelerate does without GPUs. Give --env {_ACCELERATE_USE_CPU}=true."
            )
    if spec.world_size > 1 and "horovod" in imported and spec.rank_launcher in ("spawn", "torchrun"):
        yield (
            f"{script} uses Horovod, which does not find the ranks that {spec.rank_launcher} starts: {copies}. Use "
            "--on horovod, or --rank-launcher horovod."
        )
    names = {_name(call) for call in calls}
    if spec.rank_launcher == "ray" and "init_process_group" in names and "ray" not in imported:
        yield (
            f"{script} does not use Ray, and is started once, without the variables of a rank. Use --rank-launcher "
            "torchrun to start its ranks in the cluster."
        )
    if spec.env_style == "tensorflow" and {"MultiWorkerMirroredStrategy", "fit"} <= names:
        has_keras_2 = _LEGACY_KERAS in {**os.environ, **spec.env}
        has_keras_2 = has_keras_2 or _LEGACY_KERAS.encode() in source or b"tf_keras" in source
        version = _version("keras")
        if not has_keras_2 and version is not None and int(version.partition(".")[0]) >= 3:
            yield (
                f"{script} calls fit() under MultiWorkerMirroredStrategy, which fails with Keras {version}. Install "
                f"tf_keras and give --env {_LEGACY_KERAS}=1."
            )


def _imported_packages(tree: ast.Module) -> Iterator[str]:
    modules = [alias.name for part in ast.walk(tree) if isinstance(part, ast.Import) for alias in part.names]
    modules += [part.module or "" for part in ast.walk(tree) if isinstance(part, ast.ImportFrom)]
    return (module.partition(".")[0] for module in modules)


def _name(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _is_without_devices(call: ast.Call, name: str) -> bool:
    # `*options` and `**options` may have them.
    has_others = any(isinstance(argument, ast.Starred) for argument in call.args)
    return _name(call) == name and not has_others and not {"devices", None} & {word.arg for word in call.keywords}


_TRAINING_ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments", "SFTConfig", "DPOConfig", "GRPOConfig")
_CPU_ARGUMENTS = {"Accelerator": "cpu", **dict.fromkeys(_TRAINING_ARGUMENTS, "use_cpu")}
"""The calls that begin Accelerate's process group, and their argument for ranks on CPUs."""


def _is_without_cpu(call: ast.Call, *, has_word: bool) -> bool:
    # A value such as `args.cpu` is given by a word of the command; other expressions are not judged.
    argument = _CPU_ARGUMENTS.get(_name(call))
    if argument is None or any(word.arg is None for word in call.keywords):
        return False
    value = next((word.value for word in call.keywords if word.arg == argument), ast.Constant(False))
    if isinstance(value, ast.Constant):
        return not value.value
    return isinstance(value, ast.Attribute) and not has_word


def _has_devices() -> bool:
    return visible_gpus() > 0 or any(any(Path("/dev").glob(name)) for name in _OTHER_DEVICES)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
