"""``--init-from``: the weights of another run that a new one begins with, and how far it has moved from them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from paceline.core.config import config_from_mapping
from paceline.core.errors import CheckpointError, ConfigError, PacelineError, PackageError
from paceline.core.files import is_address, write_atomically
from paceline.core.task import Task
from paceline.data.loader import EvalBatches
from paceline.elastic.group_formation import StateSource, transfer_state
from paceline.parallel.world import World
from paceline.runs.backup import open_run
from paceline.runs.checkpoint_manifest import Buffer
from paceline.runs.checkpoint_selection import select_checkpoint
from paceline.runs.checkpoint_state import file_contents, model_sha256, read_tensors
from paceline.runs.checkpoint_store import parse_name
from paceline.runs.directory import RunDirectory
from paceline.runs.package import open_package
from paceline.training.loaded_model import evaluated_weights, read_checkpoint
from paceline.training.reproducibility import build_split
from paceline.training.run_context import RunContext
from paceline_fine_tuning.adapters import merge_adapters
from paceline_fine_tuning.initialization import reinitialized_parameters
from paceline_fine_tuning.options import FineTuningOptions

COMPARED_SAMPLES = 2048
"""About so many samples of the test split, evenly spaced, are predicted by both models."""

_BLOCK = 64  # samples


@dataclass(frozen=True)
class PretrainedWeights:
    """What a run begins with: a run's weights, a checkpoint's or a package's.

    The run reads them once, when it is created, and keeps a copy in its directory.

    Attributes:
        record: where it comes from, as ``run.toml`` has it.
        weights: by the names of the task's model, on the CPU or on this rank's device.
        file: the file of safetensors whose memory they are, if any.
    """

    record: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor]
    file: Path | None = None

    @classmethod
    def read(cls, run: RunContext, source: str, world: World) -> PretrainedWeights:
        """Read them from the run's own copy if that exists, else from ``source``; all ranks call this together.

        Rank 0 reads them and sends them to the others, which may be on nodes without them. A file that all can read,
        with one size and one time of change, is mapped into the memory of each, so that it reads only what it needs.

        Raises:
            ConfigError: it is not there, or damaged; on all ranks.
            PeerLostError: a rank is gone.
        """
        parent, problem, own = None, None, None
        if world.rank == 0:
            try:
                parent = cls.load_copy(run.directory) if run.manifest else cls.find(source)
            except PacelineError as error:
                problem = str(error)
        if parent is not None and parent.file is not None:
            own = [dict(parent.record), str(parent.file), _version(parent.file)]
        problem, shared = world.broadcast_object([problem, own])
        if problem is not None:
            raise ConfigError(problem)
        if shared is not None:
            record, file, version = shared
            mapped = parent
            if mapped is None and _version(Path(file)) == version:
                with suppress(CheckpointError):
                    mapped = cls(record, _map_tensors(Path(file)), Path(file))
            if all(world.all_gather_object(mapped is not None)):
                assert mapped is not None
                return mapped
        given = {} if parent is None else {"record": dict(parent.record), "weights": dict(parent.weights)}
        behind = tuple(range(1, world.world_size))
        received = transfer_state(world, StateSource(0, 0, behind), given)
        if received is not None:
            parent = cls(received["record"], received["weights"])
        assert parent is not None
        return parent

    @classmethod
    def find(cls, source: str) -> PretrainedWeights:
        """Resolve ``--init-from``: a run, ``RUN@best``, ``RUN@last``, ``RUN@STEP``, a checkpoint, a package, or a file.

        A file is of safetensors; a checkpoint is Paceline's or a directory of ``torch.distributed.checkpoint``.

        Raises:
            ConfigError: there is no such thing.
            CheckpointError: it does not verify.
        """
        location, which = _parsed(source)
        if is_address(location):
            with open_run(location, which) as directory:
                checkpoint = select_checkpoint(directory.checkpoints, which)
                return cls._of_checkpoint(source, directory, checkpoint, f"{location}/checkpoints/{checkpoint.name}")
        path = Path(location).expanduser()
        if RunDirectory(path).exists():
            directory = RunDirectory(path)
            checkpoint = select_checkpoint(directory.checkpoints, which)
        elif which is None and _is_checkpoint(path):
            directory, checkpoint = RunDirectory(path.absolute().parent.parent), path
        elif (weights := _of_others(Path(source).expanduser())) is not None:
            record = {"source": source, "path": str(path.absolute()), "model_sha256": model_sha256(weights)}
            return cls(record, weights, path.absolute() if path.is_file() else None)
        else:
            return cls(*_of_package(source))
        return cls._of_checkpoint(source, directory, checkpoint, str(checkpoint.absolute()))

    @classmethod
    def _of_checkpoint(cls, source: str, directory: RunDirectory, checkpoint: Path, path: str) -> PretrainedWeights:
        saved = read_checkpoint(directory, checkpoint)
        info = saved.manifest.info
        entries = _task_weights(directory, evaluated_weights(saved.state))
        weights = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
        record = {
            "source": source,
            "path": path,
            "run": info.run,
            "task": info.task,
            "step": info.step,
            "version": info.state_version,
            "model_sha256": model_sha256(weights),
        }
        return cls(record, weights)

    def save_copy(self, directory: RunDirectory) -> dict[str, Any]:
        """Copy them into the run that begins with them, before it exists; rank 0 does.

        Returns:
            The record, with the copy's SHA-256.

        Raises:
            RunDirectoryError: the directory cannot be written.
        """
        digest = hashlib.sha256()

        def hash_each() -> Iterator[Buffer]:
            for content in file_contents(self.weights):
                digest.update(content)
                yield content

        try:
            write_atomically(directory.initial, hash_each())
        except OSError as error:
            raise directory.unwritable(error) from error
        return {**self.record, "copy_sha256": digest.hexdigest()}

    @classmethod
    def load_copy(cls, directory: RunDirectory) -> PretrainedWeights:
        """Read the copy that :meth:`save_copy` made."""
        record = directory.read_complete_manifest().get("parent", {})
        try:
            with directory.initial.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"the run's first weights cannot be read: {error}.") from error
        if digest != record.get("copy_sha256"):
            raise CheckpointError(
                f"{directory.initial} is not what the run began with: its SHA-256 is not that in run.toml. "
                "Restore it from a copy, or start a new run."
            )
        origin = {name: value for name, value in record.items() if name != "copy_sha256"}
        return cls(origin, _map_tensors(directory.initial), directory.initial)

    def drift(self, run: RunContext, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return the entry of ``result.json`` about the drift from parent to child, without training.

        Returns:
            ``relative_l2``, the 2-norm of the change over that of the parent's weights, over all parameters that
            began with the parent's; ``modules``, the same for each module that has parameters of its own;
            ``agreement``, the share of ``samples`` test samples that both give the same class, None where the
            task predicts no classes or its last layer was reinitialized.
        """
        child = run.task.build_model()
        fresh = reinitialized_parameters(child, run.config)
        parameters = [name for name, _ in child.named_parameters() if name not in fresh]
        whole, modules = relative_l2(parameters, self.weights, weights)
        agreement, samples = None, 0
        if not fresh:
            agreement, samples = _agreement(run, child, self.weights, weights)
        return {
            "relative_l2": whole,
            "modules": modules,
            "agreement": agreement,
            "samples": samples,
            "new": sorted(fresh),
        }


def _of_others(path: Path) -> dict[str, torch.Tensor] | None:
    """Return what a directory of ``torch.distributed.checkpoint`` or a file of safetensors holds; None for others."""
    if (path / ".metadata").is_file():
        from paceline_fine_tuning.torch_checkpoint import read_torch_weights

        return read_torch_weights(path)
    return _map_tensors(path) if path.suffix == ".safetensors" and path.is_file() else None


def _map_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of safetensors, whose content is read as it is used.

    Raises:
        CheckpointError: the file has another format.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is not a safetensors file: {error}") from error


def _version(file: Path) -> list[int] | None:
    """Return what tells a file from others on another node: its size and the time of its change; None without it."""
    try:
        found = file.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]


def _of_package(source: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the record and the weights of a package, from its directory or the user's registry."""
    try:
        package = open_package(source)
    except PackageError as error:
        if Path(source).is_file():
            raise ConfigError(
                f"--init-from {source}: a file of weights is one of safetensors. From your own file of torch.save, as "
                "Lightning's are: safetensors.torch.save_file(torch.load(FILE, weights_only=True)['state_dict'], "
                "'weights.safetensors')."
            ) from error
        raise ConfigError(
            f"--init-from {source}: this is neither a run (it has no run.toml) nor a checkpoint. As a package: {error}"
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
    return record, weights


def _parsed(source: str) -> tuple[str, str | None]:
    """Return the path or the address, and the selected checkpoint there."""
    before, at, which = source.rpartition("@")
    # An address of Azure is abfs://CONTAINER@ACCOUNT/FOLDER.
    return (before, which) if at and "/" not in which and not Path(source).exists() else (source, None)


def _task_weights(directory: RunDirectory, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights of the parent's own model, with its adapters merged."""
    lora = None
    if directory.exists():
        config = config_from_mapping(directory.read_complete_manifest()["config"], "run.toml")
        lora = config[FineTuningOptions].lora
    if lora is not None:
        return merge_adapters(weights, lora)
    if any(".lora_A." in name for name in weights):
        raise CheckpointError(
            "the checkpoint has adapters, and what their product is scaled by stands in the run.toml of its "
            "run, which is not there. Name the run instead."
        )
    return dict(weights)


def relative_l2(
    names: Sequence[str], before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> tuple[float | None, dict[str, float | None]]:
    """Return the relative 2-norm of the change over all of these parameters, and over those of each module.

    None where the parent's weights are all zero.
    """
    squares: dict[str, list[tuple[float, float]]] = {}
    for name in names:
        old, new = before[name].detach().cpu().double(), after[name].detach().cpu().double()
        pair = float((new - old).square().sum()), float(old.square().sum())
        squares.setdefault(name.rpartition(".")[0], []).append(pair)
    everywhere = [pair for pairs in squares.values() for pair in pairs]
    return _ratio(everywhere), {module: _ratio(pairs) for module, pairs in squares.items()}


def _ratio(pairs: Sequence[tuple[float, float]]) -> float | None:
    change, size = (sum(values) for values in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    return (change / size) ** 0.5 if size else None


def _agreement(
    run: RunContext, model: nn.Module, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> tuple[float | None, int]:
    task = run.task
    dataset = build_split(task, run.config.training.seed, "test")
    inference = task.inference_signature(model.eval())
    if dataset is None or inference is None or inference.label is None:
        return None, 0
    batches = EvalBatches(
        dataset,
        _BLOCK,
        seed=run.config.training.seed,
        device=torch.device("cpu"),
        workers=0,
        collate=task.collate,
        split="test",
    )
    with closing(batches):
        count = min(batches.num_batches, max(1, COMPARED_SAMPLES // _BLOCK))
        blocks = np.linspace(0, batches.num_batches - 1, count).astype(int).tolist()
        said = [_predictions(task, model, weights, batches, blocks) for weights in (before, after)]
    return float((said[0] == said[1]).double().mean()), len(said[0])


@torch.no_grad()
def _predictions(
    task: Task,
    model: nn.Module,
    weights: Mapping[str, torch.Tensor],
    batches: EvalBatches,
    blocks: Sequence[int],
) -> torch.Tensor:
    """Return the class of each sample, (N,), by a model with these weights."""
    model.load_state_dict(dict(weights))
    inference = task.inference_signature(model.eval())
    assert inference is not None
    assert inference.label is not None
    module = inference.module.eval()
    return torch.cat(
        [module(*task.inference_batch(batch.batch)[0])[inference.label].reshape(-1) for batch in batches.read(blocks)]
    )


def _is_checkpoint(path: Path) -> bool:
    """Return whether a directory has a checkpoint's name."""
    try:
        parse_name(path.name)
    except ValueError:
        return False
    return path.is_dir()
