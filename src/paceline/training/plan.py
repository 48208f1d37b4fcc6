"""From options to a run: what is left open is decided once, when the run is created."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.config import RunConfig, flag, parse_shuffle
from paceline.data.balanced_order import balanced, checked_sizes
from paceline.data.order import Carved, DataOrder, carve
from paceline.data.stream import ShardedStream, as_stream
from paceline.errors import ConfigError, DataError
from paceline.task import Task

CHANGEABLE = frozenset(
    {
        *("on", "nproc", "nodes", "node_rank", "rdzv_endpoint", "rdzv_id", "token_file", "interface"),
        *("backend", "spares"),
        *("init_timeout", "comm_debug", "threads", "device", "strategy", "mesh", "sequence_parallel"),
        *("pp_schedule", "pp_split", "zero_stage"),
        *("fsdp_wrap", "fsdp_reshard", "fsdp_offload", "fsdp_mixed_precision"),
        *("checkpoint_activations", "checkpoint_blocks"),
        *("ps_mode", "staleness", "servers"),
        *("workers", "run", "resume"),
        *("recover", "max_restarts", "heartbeat", "hang_timeout"),
        *("walltime", "verify_every"),
        *(
            "checkpoint_every",
            "keep",
            "backup_to",
            "log_every",
            "log_to",
            "profile",
            "set",
            "task",
            "accumulate",
        ),
        *("balance", "dp_devices"),
    }
)
"""Options that may differ when a run is continued: they decide no bit of the model."""

_ADJUSTABLE = frozenset(
    {"sync_every", "outer_optimizer", "outer_lr", "outer_momentum", "comm_hook", "powersgd_rank"}
)
"""Options that decide bits, but not what a state holds: kept, unless others are asked for."""


def resolve(config: RunConfig, task: Task, world_size: int) -> tuple[RunConfig, list[str]]:
    """Fill in what the task recommends and what ``auto`` means; also what to say aloud about it.

    Raises:
        ConfigError: the result cannot work.
    """
    notes = []
    shards = config.shards
    if shards is None:
        shards = task.defaults.shards if config.accumulate == 1 else "auto"
    if shards in (None, "auto"):
        ranks = config.data_ranks(world_size)
        shards = ranks * config.accumulate
        notes.append(f"shards: {shards} ({ranks} processes x {config.accumulate}), fixed for this run")
    batch = config.global_batch_size or task.defaults.global_batch_size or task.recommended_batch_size()
    epochs = config.epochs
    if epochs is None and config.max_steps is None:
        epochs = task.defaults.epochs
    resolved = dataclasses.replace(
        config,
        shards=shards,
        global_batch_size=batch,
        epochs=epochs,
        best=config.best or task.defaults.best,
    )
    check_world(resolved, world_size)
    return resolved, notes


def check_world(config: RunConfig, world_size: int) -> None:
    """Refuse processes that the mesh is not for, and more of them than shards.

    Raises:
        ConfigError: says which numbers work.
    """
    assert isinstance(config.shards, int)
    world_size = config.data_ranks(world_size)
    if world_size > config.shards:
        raise ConfigError(
            f"{world_size} processes cannot share {config.shards} shards: each needs at least one. "
            f"Use --nproc {config.shards} or fewer, or create the run with --shards {world_size} or more "
            "(12 divides well)."
        )


def continued(config: RunConfig, given: Collection[str], recorded: RunConfig) -> RunConfig:
    """The options of a run that is continued: the recorded ones, and what may change.

    Args:
        config: the options now.
        given: the names of those that were asked for.
        recorded: the options with which the run was created.

    Raises:
        ConfigError: an option that decides the model's bits was given another value.
    """
    changes: dict[str, Any] = {}
    conflicts = []
    for field in dataclasses.fields(RunConfig):
        now, before = getattr(config, field.name), getattr(recorded, field.name)
        if field.name in CHANGEABLE:
            changes[field.name] = now
        elif field.name in _ADJUSTABLE:
            changes[field.name] = now if field.name in given else before
        elif field.name in given and now not in (before, "auto"):
            conflicts.append(f"  {flag(field.name)}: {before} when the run was created, {now} now")
    if conflicts:
        raise ConfigError(
            f"{config.run} was created with other options, and a run's bits depend on them:\n"
            + "\n".join(conflicts)
            + "\nLeave them out to continue the run, or start a new one with another --run DIR."
        )
    changes["accumulate"] = recorded.accumulate
    changes["threads"] = config.threads or recorded.threads
    return dataclasses.replace(recorded, **changes)


@dataclass(frozen=True)
class DataPlan:
    """The training data and how long the run goes on.

    Attributes:
        train: the dataset, where it is map-style.
        stream: the dataset, where it is one of streams.
        order: of the training samples; None for streams.
        carved: where a validation split is taken out of ``train``.
        val: the task's own validation split, or None.
        total_steps: of the whole run; None for streams run by epochs.
    """

    train: Any
    stream: ShardedStream | None
    order: DataOrder | None
    carved: Carved | None
    val: Any
    total_steps: int | None

    @property
    def steps_per_epoch(self) -> int | None:
        """None for streams."""
        return None if self.order is None else self.order.steps_per_epoch


def plan_data(config: RunConfig, task: Task) -> DataPlan:
    """Build the training and validation datasets and the order of the samples.

    Raises:
        ConfigError: batch, shards and data do not fit together.
        DataError: a dataset is missing or of an unknown kind.
    """
    assert isinstance(config.shards, int)
    assert config.global_batch_size is not None
    train = task.build_dataset("train")
    if train is None:
        raise DataError(
            f'{type(task).__name__}.build_dataset("train") returned None; there is nothing to train on.'
        )
    val = task.build_dataset("val")
    if config.early_stop is not None and val is None and config.val_fraction is None:
        raise ConfigError(
            f"--early-stop needs a validation split, and {type(task).__name__} has none. "
            "Carve one out of the training data with --val-fraction 0.1, or leave --early-stop out."
        )
    stream = as_stream(train)
    if stream is not None:
        if config.val_fraction is not None:
            raise ConfigError("--val-fraction needs a dataset with a length; a stream has none.")
        if "pp" in config.methods and config.pp_schedule == "pipedream":
            raise ConfigError(
                "--pp-schedule pipedream reads one step ahead, which a stream cannot without knowing that "
                "there is one. Use --pp-schedule 1f1b."
            )
        return DataPlan(train, stream, None, None, val, config.max_steps)
    if not callable(getattr(train, "__len__", None)):
        raise DataError(
            f"the train dataset ({type(train).__name__}) has no length and is no IterableDataset. "
            "Return a map-style dataset (__len__ and __getitem__) or a stream."
        )
    num_samples = len(train)
    carved = None
    if config.val_fraction is not None:
        if val is not None:
            raise ConfigError(
                f"{type(task).__name__} has its own validation split; leave --val-fraction out."
            )
        carved = carve(num_samples, config.val_fraction, config.seed)
        num_samples = len(carved.train)
    order = DataOrder(
        num_samples,
        config.global_batch_size,
        config.shards,
        config.seed,
        task.min_shard,
        parse_shuffle(config.shuffle),
    )
    sizes = task.sample_sizes(train)
    if sizes is not None:
        known = checked_sizes(sizes, len(train), type(task).__name__)
        order = balanced(order, known if carved is None else known[carved.train(np.arange(num_samples))])
    total_steps = config.max_steps
    if total_steps is None:
        assert config.epochs is not None
        total_steps = config.epochs * order.steps_per_epoch
    return DataPlan(train, None, order, carved, val, total_steps)
