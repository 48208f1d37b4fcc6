"""The task whose model is a LightningModule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from paceline.adapters.lightning.data import LoadedData
from paceline.adapters.lightning.metrics import MetricTaps, replayed_metrics
from paceline.adapters.lightning.session import Session
from paceline.callback import BatchPlace, Horizon
from paceline.errors import TaskError
from paceline.task import Loss, Task


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
        ``batch_size``, if nothing else names one. Paceline decides who reads what.
        """
        return None

    def build_callbacks(self) -> list[pl.Callback]:
        """Return callbacks; those that do what Paceline does are refused."""
        return []

    def build_loggers(self, directory: Path) -> list[Any]:
        """Return loggers, which rank 0 writes with; ``directory`` is the run's."""
        return []

    # --- what Paceline calls

    _session: Session | None = field(default=None, init=False, repr=False, compare=False)
    _data: LoadedData | None = field(default=None, init=False, repr=False, compare=False)
    _datamodule: Any = field(default=None, init=False, repr=False, compare=False)

    def recommended_batch_size(self) -> int:
        return self._loaded().batch_size

    def build_dataset(self, split: str) -> Any:
        return self._loaded().dataset(split)

    def build_model(self) -> nn.Module:
        self._loaded()  # a module's setup() may look at the data
        self._session = Session(
            _checked(self, self.build_module()), self._datamodule, self.build_callbacks(), self.build_loggers
        )
        module: nn.Module = self._session.module
        return module

    def build_callback(self, model: nn.Module, horizon: Horizon) -> Session:
        self._now().plan(horizon)
        return self._now()

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return self._now().optimizer()

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> Any:
        return self._now().schedulers

    def begin_batch(self, place: BatchPlace) -> None:
        self._now().place = place

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor | Loss:
        session = self._now()
        if session.place.split != "train":
            # validation_step does not say what the loss is.
            session.place = BatchPlace(**{**vars(session.place), "split": "train", "samples": 0})
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
        split, samples = session.place.split, session.place.samples
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
        return replayed_metrics(self._taps)

    def _taps(self) -> MetricTaps:
        return self._now().taps

    def _now(self) -> Session:
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
