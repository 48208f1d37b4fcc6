"""What ``--init-from`` names, a run, a checkpoint or a package; and the copy of its weights in the child."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.checkpointer import load
from paceline.checkpoint.choice import choose, is_checkpoint
from paceline.checkpoint.state import model_sha256
from paceline.checkpoint.tensors import Snapshot, read_tensors
from paceline.config import config_from_mapping
from paceline.config.fine_tuning import Lora
from paceline.distributed.world import World
from paceline.errors import CheckpointError, ConfigError, PacelineError, PackageError
from paceline.membership.handover import Agreement, hand_over
from paceline.packages.package import open_package
from paceline.run_directory import RunDirectory, write_atomically
from paceline.training.adapters import merged
from paceline.training.run import Run

_AVERAGED = "module."  # what AveragedModel puts before the names


@dataclass(frozen=True)
class Parent:
    """What a run begins with.

    Attributes:
        record: where it comes from, as ``run.toml`` has it.
        weights: by the names of the task's model, on the CPU or on this rank's device.
    """

    record: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor]


def read_parent(run: Run, world: World) -> Parent | None:
    """What ``run`` begins with: its own copy where it exists already; all ranks call this together.

    Rank 0 reads, and gives it to the others, who may be on machines that lack it.

    Returns:
        None where the run has no ``--init-from``.

    Raises:
        ConfigError: it is not there, or damaged; on all ranks.
        PeerLostError: a rank is gone.
    """
    source = run.config.init_from
    if source is None:
        return None
    parent, problem = None, None
    if world.rank == 0:
        try:
            parent = kept_parent(run.directory) if run.directory.exists() else find_parent(source)
        except PacelineError as error:
            problem = str(error)
    problem = world.broadcast_json(problem)
    if problem is not None:
        raise ConfigError(problem)
    given = {} if parent is None else {"record": dict(parent.record), "weights": dict(parent.weights)}
    behind = tuple(range(1, world.world_size))
    received = hand_over(world, Agreement(0, 0, behind), given)
    if received is not None:
        parent = Parent(received["record"], received["weights"])
    assert parent is not None
    return parent


def find_parent(source: str) -> Parent:
    """What ``--init-from`` names: a run, ``RUN@best``, ``RUN@last``, ``RUN@STEP``, a checkpoint, a package.

    Raises:
        ConfigError: there is no such thing.
        CheckpointError: it does not verify.
    """
    path, which = _parsed(source)
    if RunDirectory(path).exists():
        directory = RunDirectory(path)
        checkpoint = choose(directory.checkpoints, which)
    elif which is None and is_checkpoint(path):
        directory, checkpoint = RunDirectory(path.absolute().parent.parent), path
    else:
        return _of_package(source)
    saved = load(checkpoint)
    info = saved.manifest.info
    entries = evaluated_weights(saved.state, _adapters_of(directory))
    weights = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
    record = {
        "source": source,
        "path": str(checkpoint.absolute()),
        "run": info.run,
        "task": info.task,
        "step": info.step,
        "version": info.state_version,
        "model_sha256": model_sha256(weights),
    }
    return Parent(record, weights)


def _of_package(source: str) -> Parent:
    """The weights of a package, from its directory or the user's registry."""
    try:
        package = open_package(source)
    except PackageError as error:
        raise ConfigError(
            f"--init-from {source}: this is no run (it has no run.toml) and no checkpoint. As a package: "
            f"{error}"
        ) from error
    manifest = package.manifest
    if manifest.quantization == "int8":
        raise ConfigError(
            f"--init-from {source}: the package's weights are int8, which cannot be trained. Use the run "
            f"{manifest.provenance.run} that it was exported from, or a package without --quantize."
        )
    made_by = manifest.provenance
    weights = read_tensors(package.read_weights())
    record = {
        "source": source,
        "path": str(package.path.absolute()),
        "package": package.digest,
        "run": made_by.run,
        "task": made_by.task,
        "step": made_by.step,
        "version": made_by.state_version,
        "model_sha256": model_sha256(weights),
    }
    return Parent(record, weights)


def _parsed(source: str) -> tuple[Path, str | None]:
    """The path, and which checkpoint in it."""
    before, at, which = source.rpartition("@")
    if not at or Path(source).exists():
        return Path(source).expanduser(), None
    return Path(before).expanduser(), which


def _adapters_of(directory: RunDirectory) -> Lora | None:
    """What ``--lora`` the parent was trained with; a checkpoint alone has none that could be known."""
    if not directory.exists():
        return None
    return config_from_mapping(directory.read_complete_manifest()["config"], "run.toml").adapters


def evaluated_weights(state: Mapping[str, Any], lora: Lora | None) -> dict[str, Any]:
    """The weights of a checkpoint that were evaluated: the moving average, where there is one.

    Args:
        state: the checkpoint's.
        lora: the adapters that its run was trained with.

    Returns:
        What ``load_state_dict`` of the task's own model takes; adapters are merged.

    Raises:
        CheckpointError: there is no model in it, or one with adapters that ``lora`` does not know of.
    """
    if "model" not in state:
        raise CheckpointError("the checkpoint holds no model.")
    entries = state["model"]
    if "ema" in state:
        entries = {
            name.removeprefix(_AVERAGED): value
            for name, value in state["ema"].items()
            if name.startswith(_AVERAGED)
        }
    if lora is not None:
        return merged(entries, lora)
    if any(".lora_A." in name for name in entries):
        raise CheckpointError(
            "the checkpoint has adapters, and what their product is scaled by stands in the run.toml of its "
            "run, which is not there. Name the run instead."
        )
    return dict(entries)


def keep_parent(directory: RunDirectory, parent: Parent) -> dict[str, Any]:
    """Copy what a run begins with into it, before it exists; rank 0 does.

    Returns:
        The record, with the copy's SHA-256.

    Raises:
        RunDirectoryError: the directory cannot be written.
    """
    snapshot = Snapshot()
    snapshot.capture({directory.initial.name: parent.weights})
    ((_, parts),) = snapshot.contents()
    content = b"".join(parts)
    try:
        write_atomically(directory.initial, content)
    except OSError as error:
        raise directory.unwritable(error) from error
    return {**parent.record, "copy_sha256": hashlib.sha256(content).hexdigest()}


def kept_parent(directory: RunDirectory) -> Parent:
    """The copy that :func:`keep_parent` made.

    Raises:
        CheckpointError: it is damaged, or gone.
    """
    record = directory.read_complete_manifest().get("parent", {})
    try:
        content = directory.initial.read_bytes()
    except OSError as error:
        raise CheckpointError(f"the run's first weights cannot be read: {error}.") from error
    if hashlib.sha256(content).hexdigest() != record.get("copy_sha256"):
        raise CheckpointError(
            f"{directory.initial} is not what the run began with: its SHA-256 is not that in run.toml. "
            "Restore it from a copy, or start a new run."
        )
    return Parent({n: v for n, v in record.items() if n != "copy_sha256"}, read_tensors(content))
