"""What a LightningModule or LightningDataModule loads: the datasets, and how samples become a batch."""

from __future__ import annotations

import fcntl
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from paceline.errors import DataError

_METHODS = {"train": "train_dataloader", "val": "val_dataloader", "test": "test_dataloader"}
_STAGES = {"train": "fit", "val": "fit", "test": "test"}


class LoadedData:
    """Takes the loaders apart: Paceline itself decides which rank reads which sample, and when.

    Args:
        source: what has the loaders.

    Attributes:
        collate: a list of samples -> a batch; the same for all splits.

    Raises:
        DataError: a loader does what Paceline cannot keep.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._name = type(source).__name__
        with _one_at_a_time(type(source)):
            source.prepare_data()
        self._ready: set[str] = set()
        train = self._loader("train")
        if train is None:
            kind = "LightningModule" if isinstance(source, pl.LightningModule) else "LightningDataModule"
            raise DataError(
                f"{self._name} has no train_dataloader. Write one, or return a LightningDataModule from the "
                f"task's build_datamodule(). ({self._name} is a {kind}.)"
            )
        self.collate = train.collate_fn
        self.batch_size = int(train.batch_size or 1)
        self._datasets: dict[str, Any] = {"train": train.dataset}

    def dataset(self, split: str) -> Any:
        """The dataset of a split, or None where there is none."""
        if split not in self._datasets:
            loader = self._loader(split)
            if loader is not None and loader.collate_fn != self.collate:
                raise DataError(
                    f"{self._name}.{_METHODS[split]} has another collate_fn than train_dataloader, and a "
                    "task has one. Give all loaders the same function."
                )
            self._datasets[split] = None if loader is None else loader.dataset
        return self._datasets[split]

    def _loader(self, split: str) -> DataLoader[Any] | None:
        method, stage = _METHODS[split], _STAGES[split]
        if not is_overridden(method, self._source):
            return None
        if stage not in self._ready:
            self._source.setup(stage)
            self._ready.add(stage)
        loader = getattr(self._source, method)()
        if isinstance(loader, list | tuple) and len(loader) == 1:
            loader = loader[0]
        if loader is None or (isinstance(loader, list | tuple) and not loader):
            return None
        where = f"{self._name}.{method}"
        if not isinstance(loader, DataLoader):
            raise DataError(
                f"{where} returned a {type(loader).__name__}; it must be one torch DataLoader. Several "
                "validation sets need a task of their own: write a paceline.Task."
            )
        _check(loader, where)
        return loader


def _check(loader: DataLoader[Any], where: str) -> None:
    if loader.batch_size is None and loader.batch_sampler is None:
        raise DataError(
            f"{where} has batch_size=None; Paceline makes the batches itself. Return single samples."
        )
    if isinstance(loader.dataset, IterableDataset):
        return
    samplers = (loader.sampler, loader.batch_sampler)
    for sampler, known in zip(samplers, ((RandomSampler, SequentialSampler), (BatchSampler,)), strict=True):
        if type(sampler) not in known:
            raise DataError(
                f"{where} has a {type(sampler).__name__}; which samples a step sees is Paceline's to "
                "decide, so that it is the same for any number of processes. Leave it out (--shuffle none "
                "keeps the dataset's own order)."
            )
    drawn = loader.sampler
    if not isinstance(drawn, RandomSampler):
        return
    if drawn.replacement or drawn.num_samples != len(drawn.data_source):
        raise DataError(
            f"{where} has a RandomSampler that draws {drawn.num_samples} samples"
            f"{' with replacement' if drawn.replacement else ''}; an epoch has every sample of the dataset "
            "once. Leave it out, or return a dataset of what an epoch is to have (torch's Subset)."
        )


@contextmanager
def _one_at_a_time(kind: type) -> Iterator[None]:
    """One process of this machine after another, so that none downloads what another is downloading.

    What is locked is the file of the class, which all of them have and none has to remove.
    """
    try:
        file = open(inspect.getfile(kind), "rb")  # noqa: SIM115  # closed below; it may not open at all
    except (OSError, TypeError):
        yield
        return
    with file:
        with suppress(OSError):  # some network file systems lock for writers only
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
