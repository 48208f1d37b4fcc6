"""A LightningModule as a task."""

from __future__ import annotations

import copy
import dataclasses
import fcntl
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from paceline.core.errors import DataError, TaskError
from paceline.core.task import BatchInfo, Defaults, Loss, RunSchedule, Task
from paceline_lightning.bridge import LightningBridge
from paceline_lightning.metrics import MetricRecorder, replay_metrics

# --- What a LightningModule or LightningDataModule loads: the datasets, and how samples become a batch ---


_METHODS = {"train": "train_dataloader", "val": "val_dataloader", "test": "test_dataloader"}
_STAGES = {"train": "fit", "val": "fit", "test": "test"}


class LoadedData:
    """Takes the loaders apart: Paceline itself decides which rank reads which sample, and when.

    Attributes:
        collate: a list of samples -> a batch; the same for all splits.
        sample_weights: the training loader's sampler, if it draws by weights.

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
        self.batch_size = int(train.batch_size or getattr(train.batch_sampler, "batch_size", None) or 1)
        sampler = _sampler(train)
        self.sample_weights = sampler if isinstance(sampler, WeightedRandomSampler) else None
        self._datasets: dict[str, Any] = {"train": train.dataset}

    def dataset(self, split: str) -> Any:
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
        _check(loader, where, weighted=split == "train")
        return loader


def _sampler(loader: DataLoader[Any]) -> Any:
    """Return what draws the samples, also where the loader was given a ``batch_sampler``."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _check(loader: DataLoader[Any], where: str, *, weighted: bool) -> None:
    if loader.batch_size is None and loader.batch_sampler is None:
        raise DataError(f"{where} has batch_size=None; Paceline makes the batches itself. Return single samples.")
    if isinstance(loader.dataset, IterableDataset):
        return
    samplers = (_sampler(loader), loader.batch_sampler)
    orders = (RandomSampler, SequentialSampler, *((WeightedRandomSampler,) if weighted else ()))
    for sampler, known in zip(samplers, (orders, (BatchSampler,)), strict=True):
        if type(sampler) not in known:
            raise DataError(
                f"{where} has a {type(sampler).__name__}; which samples a step sees is Paceline's to "
                "decide, so that it is the same for any number of processes. Leave it out (--shuffle none "
                "keeps the dataset's own order), or return weights from the task's sample_weights()."
            )
    drawn = _sampler(loader)
    if not isinstance(drawn, RandomSampler):
        return
    if drawn.replacement or drawn.num_samples != len(drawn.data_source):
        raise DataError(
            f"{where} has a RandomSampler that draws {drawn.num_samples} samples"
            f"{' with replacement' if drawn.replacement else ''}; an epoch has every sample of the dataset "
            "once. Leave it out, or return a dataset with the samples of an epoch (torch's Subset)."
        )


@contextmanager
def _one_at_a_time(kind: type) -> Iterator[None]:
    """Let the processes of this node enter one after another, so that only one downloads the data.

    The lock is on the file of the class, which all of them have and none has to remove.
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


# --- The task whose model is a LightningModule ---


@dataclass
class LightningTask(Task):
    """A LightningModule, trained by Paceline: its steps, optimizer, hooks, callbacks and loggers.

    Subclass it as a dataclass; only :meth:`build_module` is required. The checkpoint holds the module's own
    ``state_dict``. What cannot be kept is refused, and listed in the documentation.
    """

    def build_module(self) -> pl.LightningModule:
        """Return the LightningModule, on the CPU."""
        raise TaskError(f"{type(self).__name__} must define build_module(self).")

    def build_datamodule(self) -> pl.LightningDataModule | None:
        """Return what has the loaders, or None where the module itself has them.

        Datasets and ``collate_fn`` are taken from the loaders, and the global batch size from
        ``batch_size``, if nothing else names one. Paceline decides which process reads which sample.
        """
        return None

    def build_callbacks(self) -> list[pl.Callback]:
        """Return callbacks; those that do what Paceline does are refused."""
        return []

    def build_loggers(self, directory: Path) -> list[Any]:
        """Return loggers, which rank 0 writes with; ``directory`` is the run's."""
        return []

    # --- what Paceline calls

    _session: LightningBridge | None = field(default=None, init=False, repr=False, compare=False)
    _data: LoadedData | None = field(default=None, init=False, repr=False, compare=False)
    _datamodule: Any = field(default=None, init=False, repr=False, compare=False)

    def recommended_batch_size(self) -> int:
        return self._loaded().batch_size

    def build_dataset(self, split: str) -> Any:
        return self._loaded().dataset(split)

    def sample_weights(self, dataset: Any) -> Any:
        return self._loaded().sample_weights

    def build_model(self) -> nn.Module:
        self._loaded()  # a module's setup() may read the data
        self._session = LightningBridge(
            _checked(self, self.build_module()), self._datamodule, self.build_callbacks(), self.build_loggers
        )
        module: nn.Module = self._session.module
        return module

    def build_callback(self, model: nn.Module, schedule: RunSchedule) -> LightningBridge:
        self._now().plan(schedule)
        return self._now()

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return self._now().optimizer()

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> Any:
        return self._now().schedulers

    def on_batch_begin(self, info: BatchInfo) -> None:
        self._now().batch_info = info

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor | Loss:
        session = self._now()
        if session.batch_info.split != "train":
            # validation_step does not say what the loss is.
            session.batch_info = BatchInfo(**{**vars(session.batch_info), "split": "train", "samples": 0})
        output = session.train_batch(model, batch)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None:
            raise TaskError(
                f"{type(session.module).__name__}.training_step returned no loss. A step is the mean over "
                'its samples, so none can be skipped: return the loss, or {"loss": loss}.'
            )
        assert isinstance(loss, torch.Tensor | Loss)
        return loss

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        session = self._now()
        split, samples = session.batch_info.split, session.batch_info.samples
        if not is_overridden("validation_step" if split == "val" else "test_step", session.module):
            return {}
        output, logged, calls = session.run_step(model, batch)
        values: dict[str, Any] = {n: (float(e.value) * e.weight, e.weight) for n, e in logged.items()}
        loss = output.get("loss") if isinstance(output, Mapping) else output
        for name in (f"{split}_loss", f"{split}/loss"):
            if name in values:
                values.setdefault("loss", values[name])
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            values.setdefault("loss", (float(loss) * samples, samples))
        return values | calls

    def build_metrics(self) -> Mapping[str, Any]:
        return replay_metrics(self._taps)

    def _taps(self) -> MetricRecorder:
        return self._now().taps

    def _now(self) -> LightningBridge:
        assert self._session is not None, "the model is built first"
        return self._session

    def _loaded(self) -> LoadedData:
        if self._data is None:
            self._datamodule = self.build_datamodule()
            source = self._datamodule
            if source is None:
                # An instance of its own: the one that is trained is built when the randomness is seeded.
                source = _checked(self, self.build_module())
            self._data = LoadedData(source)
            self.collate = self._data.collate  # type: ignore[method-assign, assignment]  # pickled without the task
        return self._data


def _checked(task: LightningTask, module: Any) -> pl.LightningModule:
    if isinstance(module, pl.LightningModule):
        return module
    old = type(module).__mro__[1].__module__.startswith("pytorch_lightning")
    hint = " It comes from pytorch_lightning: import lightning.pytorch instead." if old else ""
    raise TaskError(
        f"{type(task).__name__}.build_module returned a {type(module).__name__}; it must return a "
        f"lightning.pytorch.LightningModule.{hint}"
    )


# --- A task class in one line, whose fields are the arguments of the module and the datamodule ---


_PLAIN = (bool, int, float, str, list, tuple)


def task(
    module: type[pl.LightningModule],
    datamodule: type[pl.LightningDataModule] | None = None,
    *,
    name: str,
    callbacks: Callable[[], Sequence[pl.Callback]] | None = None,
    loggers: Callable[[Path], Sequence[Any]] | None = None,
    defaults: Defaults | None = None,
) -> type[LightningTask]:
    """Return the task class of a LightningModule class; assign it to ``name`` at the top level of a file.

    Its fields are the arguments of both ``__init__`` that have a number, text or list as their default or
    annotation; one that both have is one field.

    Args:
        module: the LightningModule's class.
        datamodule: the class that has the loaders, if that is not the module itself.
        name: the name of its variable, and so the name after ``file.py:``.
        callbacks: returns the callbacks.
        loggers: returns the loggers, of the run's directory.

    Raises:
        TaskError: an argument without a default has no type that ``--set`` could give it.
    """
    kinds = [kind for kind in (module, datamodule) if kind is not None]
    arguments = {kind: _arguments(kind) for kind in kinds}
    fields: dict[str, Any] = {}
    for kind in kinds:
        for field_name, (hint, default) in arguments[kind].items():
            known = fields.setdefault(field_name, (hint, default))
            if known != (hint, default):
                raise TaskError(
                    f"{module.__name__} and {kind.__name__} both have {field_name!r}, with other types or "
                    "defaults. Write a LightningTask, which can tell them apart."
                )

    def build(kind: type[Any]) -> Callable[[LightningTask], Any]:
        return lambda self: kind(**{each: getattr(self, each) for each in arguments[kind]})

    namespace: dict[str, Any] = {"build_module": build(module), "__doc__": module.__doc__}
    if defaults is not None:
        namespace["defaults"] = defaults
    if datamodule is not None:
        namespace["build_datamodule"] = build(datamodule)
    if callbacks is not None:
        namespace["build_callbacks"] = lambda self: list(callbacks())
    if loggers is not None:
        namespace["build_loggers"] = lambda self, directory: list(loggers(directory))
    required = [(n, hint) for n, (hint, default) in fields.items() if default is inspect.Parameter.empty]
    optional = [
        (n, hint, dataclasses.field(default_factory=partial(copy.copy, default)))
        for n, (hint, default) in fields.items()
        if default is not inspect.Parameter.empty
    ]
    every: list[Any] = [*required, *optional]
    made = dataclasses.make_dataclass(name, every, bases=(LightningTask,), namespace=namespace)
    made.__module__ = sys._getframe(1).f_globals["__name__"]
    return made


def _arguments(kind: type[Any]) -> dict[str, tuple[Any, Any]]:
    """Return the arguments of ``__init__`` that a field can hold: name -> type and default."""
    found = {}
    for parameter in inspect.signature(kind, eval_str=True).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        hint, default = parameter.annotation, parameter.default
        required = default is parameter.empty
        if not required and default is not None and not isinstance(default, _PLAIN):
            continue  # it keeps its default
        if hint is parameter.empty:
            if required or default is None:
                raise TaskError(
                    f"{kind.__name__}.__init__: {parameter.name!r} has neither a type nor a default that "
                    "tells it. Annotate it, or write a LightningTask."
                )
            hint = type(default)
        if hasattr(LightningTask, parameter.name):
            raise TaskError(
                f"{kind.__name__}.__init__: {parameter.name!r} is also something that every task has. "
                "Rename the argument, or write a LightningTask with a field of another name."
            )
        found[parameter.name] = (hint, default)
    return found
