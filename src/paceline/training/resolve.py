"""From options to a run: defaults that depend on the task or the job are decided once, when the run is created."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import WeightedRandomSampler

from paceline.core.config import ResolvedConfig, RunConfig
from paceline.core.errors import ConfigError, DataError
from paceline.core.task import Task
from paceline.data.balanced_order import balance_order, check_lengths
from paceline.data.order import DeterministicSampler
from paceline.data.stream import ShardedStream, as_stream
from paceline.data.train_val_split import TrainValSplit, split_train_val
from paceline.data.weighted_order import check_weights, weigh_order
from paceline.parallel.options import PipelineOptions
from paceline.training.reproducibility import build_split


def resolve_config(config: RunConfig, task: Task, world_size: int) -> tuple[ResolvedConfig, list[str]]:
    """Return the options with the task's defaults, and lines to print about them.

    Raises:
        ConfigError: the result cannot work.
    """
    notes = []
    microbatches = config.parallel.microbatches
    if microbatches is None:
        microbatches = task.defaults.microbatches if config.parallel.grad_accumulation == 1 else "auto"
    if microbatches in (None, "auto"):
        ranks = config.data_ranks(world_size)
        microbatches = ranks * config.parallel.grad_accumulation
        of_each = config.parallel.grad_accumulation
        notes.append(f"micro-batches: {microbatches} ({ranks} processes x {of_each}), fixed for this run")
    batch = config.training.global_batch_size or task.defaults.global_batch_size or task.recommended_batch_size()
    epochs = config.training.epochs
    if epochs is None and config.training.max_steps is None:
        epochs = task.defaults.epochs
    resolved = ResolvedConfig(
        **{
            **config.values,
            "microbatches": microbatches,
            "global_batch_size": batch,
            "epochs": epochs,
            "best_metric": config.values["best_metric"] or task.defaults.best_metric,
        }
    )
    check_world(resolved, world_size)
    return resolved, notes


def check_world(config: ResolvedConfig, world_size: int) -> None:
    """Reject a number of processes that does not fit the mesh, or exceeds the micro-batches.

    Raises:
        ConfigError: says which numbers work.
    """
    world_size = config.data_ranks(world_size)
    if world_size > config.microbatches:
        raise ConfigError(
            f"{world_size} processes cannot share {config.microbatches} micro-batches: each needs at least one. "
            f"Use --nproc {config.microbatches} or fewer, or create the run with --microbatches {world_size} or more "
            "(12 divides well)."
        )


@dataclass(frozen=True)
class DataSetup:
    """The training data and the run's length.

    Attributes:
        train: the dataset, where it is map-style.
        stream: the dataset, where it is one of streams.
        order: of the training samples; None for streams.
        train_val_split: if a validation split is taken out of ``train``.
        val: the task's own validation split, or None.
        total_steps: of the whole run; None for streams run by epochs.
    """

    train: Any
    stream: ShardedStream | None
    order: DeterministicSampler | None
    train_val_split: TrainValSplit | None
    val: Any
    total_steps: int | None

    @property
    def steps_per_epoch(self) -> int | None:
        """None for streams."""
        return None if self.order is None else self.order.steps_per_epoch

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation split."""
        return self.train_val_split is not None or self.val is not None


def set_up_data(config: ResolvedConfig, task: Task) -> DataSetup:
    """Build the training and validation datasets and the order of the samples.

    Raises:
        ConfigError: batch, micro-batches and data do not fit together.
        DataError: a dataset is missing or of an unknown kind.
    """
    train = build_split(task, config.training.seed, "train")
    if train is None:
        raise DataError(f'{type(task).__name__}.build_dataset("train") returned None; there is nothing to train on.')
    val = build_split(task, config.training.seed, "val")
    if config.evaluation.early_stop is not None and val is None and config.data.val_fraction is None:
        raise ConfigError(
            f"--early-stop needs a validation split, and {type(task).__name__} has none. "
            "Carve one out of the training data with --val-fraction 0.1, or leave --early-stop out."
        )
    stream = as_stream(train)
    if stream is not None:
        if config.data.val_fraction is not None:
            raise ConfigError("--val-fraction needs a dataset with a length; a stream has none.")
        if task.sample_weights(train) is not None:
            raise DataError(f"{type(task).__name__}.sample_weights needs a dataset with a length; a stream has none.")
        if "pp" in config.strategies and config[PipelineOptions].pp_schedule == "pipedream":
            raise ConfigError(
                "--pp-schedule pipedream reads one step ahead, which a stream cannot without knowing that "
                "there is one. Use --pp-schedule 1f1b."
            )
        return DataSetup(train, stream, None, None, val, config.training.max_steps)
    if not callable(getattr(train, "__len__", None)):
        raise DataError(
            f"the train dataset ({type(train).__name__}) has no length and is not an IterableDataset. "
            "Return a map-style dataset (__len__ and __getitem__) or a stream."
        )
    num_samples = len(train)
    train_val_split = None
    if config.data.val_fraction is not None:
        if val is not None:
            raise ConfigError(f"{type(task).__name__} has its own validation split; leave --val-fraction out.")
        train_val_split = split_train_val(num_samples, config.data.val_fraction, config.training.seed)
        num_samples = len(train_val_split.train)
    order = DeterministicSampler(
        num_samples,
        config.global_batch_size,
        config.microbatches,
        config.training.seed,
        task.min_microbatch_size,
        config.data.shuffle,
    )
    numbers = slice(None) if train_val_split is None else train_val_split.train(np.arange(num_samples))
    given = task.sample_weights(train)
    if given is not None:
        sampler = given if isinstance(given, WeightedRandomSampler) else None
        weights = check_weights(given if sampler is None else sampler.weights, len(train), type(task).__name__)
        order = weigh_order(
            order,
            weights[numbers],
            replacement=sampler is None or sampler.replacement,
            num_samples=num_samples if sampler is None else sampler.num_samples,
        )
    sizes = task.sample_lengths(train)
    if sizes is not None:
        order = balance_order(order, check_lengths(sizes, len(train), type(task).__name__)[numbers])
    total_steps = config.training.max_steps
    if total_steps is None:
        assert config.training.epochs is not None
        total_steps = config.training.epochs * order.steps_per_epoch
    return DataSetup(train, None, order, train_val_split, val, total_steps)
