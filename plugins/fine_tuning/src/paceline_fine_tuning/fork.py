"""A run that is forked from another one: it continues from a checkpoint of that run, with other hyperparameters.

Its length may be another one, too, and from the end of an epoch on its batches.

A fork has an id of its own, and copies of the checkpoint, the ledger and the metrics, so that ``paceline resume``
continues it as any other run, and its audit covers the steps from before the fork. The table ``forked`` of its
``run.toml`` says where it comes from.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from paceline.core.config import OF_FORKS, config_from_mapping
from paceline.core.errors import ConfigError, RunDirectoryError
from paceline.core.files import is_address, rename
from paceline.core.task_loading import TaskReference, recorded_spec, task_fields
from paceline.data.ledger import copy_until, read_ledger
from paceline.runs.checkpoint_manifest import read_manifest, temporary_directory, verify
from paceline.runs.checkpoint_selection import select_checkpoint
from paceline.runs.checkpoint_store import copy, find_version, parse_name, remove_stale, scan
from paceline.runs.directory import EpochSteps, Fork, RunDirectory
from paceline.runs.metric_writers import keep_until

_LENGTHS, _BATCHES = OF_FORKS[:2], OF_FORKS[2:]


def fork_run(
    source: RunDirectory,
    target: RunDirectory,
    fields: Mapping[str, Any],
    *,
    options: Mapping[str, int] | None = None,
    step: int | None = None,
    name: str | None = None,
) -> Fork:
    """Make ``target`` a run that continues from a checkpoint of ``source``, which may be training meanwhile.

    Args:
        target: the new run's directory, which must not exist.
        fields: new values of the task's fields, by name, as ``--set`` accepts them.
        options: those of ``source`` that change: ``epochs`` or ``max_steps``, ``global_batch_size``, ``microbatches``.
        step: the steps after which the checkpoint was saved; None: the newest one that verifies.
        name: where ``source`` is, for the record; None: its path.

    Raises:
        RunDirectoryError: ``source`` holds no run, or ``target`` exists or cannot be written.
        ConfigError: there is no checkpoint of this step, it is the last step of the run, or the options do not fit it.
        CheckpointError: no checkpoint can be used, or the chosen one is damaged.
        TaskError: the task has no such field, or does not accept a value.
    """
    manifest = source.read_complete_manifest()
    recorded = manifest["task"]["fields"]
    spec = recorded_spec(manifest["task"])
    before = task_fields(TaskReference(spec, recorded).load())
    after = task_fields(TaskReference(spec, {**recorded, **fields}).load())
    checkpoint = select_checkpoint(source.checkpoints, "last" if step is None else str(step))
    info = verify(checkpoint).info
    Fork.require_no_earlier(manifest, checkpoint, info.state_version)
    config, replaced = _with_options(manifest["config"], options or {})
    epochs, data = EpochSteps.of(manifest), {**manifest.get("data", {})}
    usable = {parse_name(path.name)[0]: path for path in reversed(scan(source.checkpoints))}  # the first step first
    if replaced.keys() & set(_BATCHES):
        usable = _at_epoch_ends(source, info.step, usable, epochs)
        order = read_ledger(source.ledger).order
        assert order is not None, "the run is not of a stream"
        batch = {"global_batch_size": config["global_batch_size"], "num_microbatches": config["microbatches"]}
        epochs = EpochSteps(replace(order, **batch).steps_per_epoch, info.epoch, info.step)
        data |= {"steps_per_epoch": epochs.per_epoch, "first_epoch": info.epoch, "first_step": info.step}
    if replaced:
        data["total_steps"] = config.get("max_steps")
        if data["total_steps"] is None and epochs is not None:
            data["total_steps"] = epochs.begin(int(config["epochs"]))
    total = data.get("total_steps")
    if isinstance(total, int) and info.step >= total:
        earlier = [number for number in usable if number < total]
        steps = ", ".join(map(str, earlier))
        raise ConfigError(
            f"step {info.step:,} is the end of {source.path}, so a fork of it has no step to train. "
            + (f"Choose an earlier checkpoint by --step: {steps}" if earlier else "It holds no earlier checkpoint")
            + ", or make it longer by --epochs or --max-steps."
        )
    fork = Fork(
        run=manifest["id"],
        path=name or str(source.path.absolute()),
        step=info.step,
        version=info.state_version,
        changed={name: value for name, value in before.items() if after[name] != value},
        options=replaced,
    )
    run = secrets.token_hex(8)
    batches = {name: config[name] for name in _BATCHES}
    with _new_directory(target) as draft:
        kept = {checkpoint}
        if info.best_version is not None:
            kept.add(find_version(source.checkpoints, info.best_version))
        for path in sorted(kept):
            pins = {**read_manifest(path).info.pins, **batches}
            copy(path, draft.checkpoints, run=run, pins=pins, microbatches=config["microbatches"])
        copy_until(source.ledger, draft.ledger, fork.version)
        for path in (source.metrics, source.initial, source.sample_lengths, source.sample_weights):
            with suppress(FileNotFoundError):
                shutil.copyfile(path, draft.path / path.name)
        keep_until(draft.metrics, fork.step)
        draft.append_event("created", task=manifest["task"]["spec"])
        differs = {"changed": dict(fork.changed), "options": replaced}
        draft.append_event("forked", run=fork.run, path=fork.path, step=fork.step, **differs)
        draft.write_manifest(
            {
                **manifest,
                "id": run,
                "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "task": {**manifest["task"], "fields": after},
                "config": {**config, "run_dir": str(target.path)},
                "data": data,
                "pins": {**manifest["pins"], **batches},
                "forked": asdict(fork),
            }
        )
    return fork


def _with_options(
    recorded: Mapping[str, Any], options: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, int | None]]:
    """Return the options of the fork, and the recorded values of those that differ."""
    config = dict(recorded)
    if is_address(str(config.get("backup_to"))):
        del config["backup_to"]  # there is the other run
    if options.keys() & set(_LENGTHS):
        for name in _LENGTHS:
            config.pop(name, None)
    config |= options
    config_from_mapping(config, "the command line")
    differs = {name: recorded.get(name) for name in OF_FORKS if config.get(name) != recorded.get(name)}
    return config, differs


def _at_epoch_ends(
    source: RunDirectory, step: int, steps: Mapping[int, Path], epochs: EpochSteps | None
) -> dict[int, Path]:
    """Return the checkpoints with which an epoch is complete, so that other batches can follow."""
    if epochs is None:
        raise ConfigError(
            f"{source.path} is trained on a stream, of which other batches would have other samples: a fork of it "
            "keeps --global-batch-size and --microbatches."
        )
    begun = {number: read_manifest(path).info.epoch for number, path in steps.items()}
    ends = {
        number: path
        for number, path in steps.items()
        if begun[number] >= epochs.first_epoch and number == epochs.begin(begun[number])
    }
    if step not in ends:
        nearest = min(ends, key=lambda number: abs(number - step), default=None)
        raise ConfigError(
            f"other batches can begin with an epoch only, and step {step} of {source.path} is within one: "
            + ("none of its checkpoints is at an epoch's end." if nearest is None else f"choose --step {nearest}.")
        )
    return ends


@contextmanager
def _new_directory(target: RunDirectory) -> Iterator[RunDirectory]:
    """Yield a directory that becomes ``target`` at the end, unless there was an error."""
    parent = target.path.parent
    try:
        if target.path.exists():
            raise RunDirectoryError(f"{target.path} exists already. Choose another directory with --run-dir DIR.")
        parent.mkdir(parents=True, exist_ok=True)
        remove_stale(parent)
        with temporary_directory(parent) as path:
            draft = RunDirectory(path)
            draft.create()
            yield draft
            rename(path, target.path)
    except OSError as error:
        raise target.unwritable(error) from error
