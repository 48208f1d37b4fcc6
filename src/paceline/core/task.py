"""The task: the class that a user writes, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from paceline.core.errors import TaskError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.optim import Optimizer

    from paceline.core.callback import BatchInfo, Callback, RunSchedule
    from paceline.core.inference import InferenceSignature
    from paceline.core.train_step import TrainStep


class Loss(NamedTuple):
    """A loss whose samples have different weights (tokens, ignored labels).

    Attributes:
        sum: scalar tensor, the sum of the losses; differentiable.
        weight: divisor of the total ``sum``, applied once after the sums of all micro-batches are added up.
    """

    sum: torch.Tensor
    weight: torch.Tensor | float


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """Options that a task recommends for its runs; explicit options override them."""

    global_batch_size: int | None = None
    microbatches: int | None = None
    epochs: int = 1
    best_metric: str | None = None
    search: tuple[str, ...] = ()
    """The search space of ``paceline tune`` without ``--search``, in its form: ``("lr=log:1e-3:1",)``."""


@dataclass
class Task:
    """A training task: a dataclass whose fields are its hyperparameters.

    Subclass it as a dataclass and write the methods. Only :meth:`build_model`,
    :meth:`build_dataset`, :meth:`build_optimizer` and :meth:`loss` are required.
    """

    defaults: ClassVar[Defaults] = Defaults()
    min_microbatch_size: ClassVar[int] = 2
    """The minimum number of samples in a micro-batch (batch norm cannot take one)."""

    static_graph: ClassVar[bool] = False
    """Whether every step uses the same parameters in the same way: DistributedDataParallel then need not search each
    step's graph for unused ones."""

    def build_model(self) -> nn.Module:
        """Return the model, on the CPU; Paceline seeds before the call and moves it after."""
        raise TaskError(f"{type(self).__name__} must define build_model(self).")

    def build_dataset(self, split: str) -> Any:
        """Return the dataset of ``split`` ("train", "val" or "test"), or None if the task has none.

        A map-style dataset (``__len__`` and ``__getitem__``) or a ``TensorDataset``; for "train" also an
        ``IterableDataset`` or a :class:`paceline.data.stream.ShardedStream`.
        """
        raise TaskError(f"{type(self).__name__} must define build_dataset(self, split).")

    def build_optimizer(self, model: nn.Module) -> Optimizer | Mapping[str, Optimizer]:
        """Return one optimizer, or several by name; they are stepped in that order."""
        raise TaskError(f"{type(self).__name__} must define build_optimizer(self, model).")

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> Any:
        """Return a learning-rate scheduler, stepped after each step, or None.

        ``ReduceLROnPlateau`` is stepped after each evaluation instead, with the ``--best-metric`` metric.
        Called once for each optimizer. ``total_steps`` is the whole run's number of steps; it is 0 for a stream trained
        by epochs, whose length is unknown; return only ``ReduceLROnPlateau`` there.
        """
        return None

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor | Loss:
        """Return the mean loss over the batch's samples, or a :class:`Loss`."""
        raise TaskError(f"{type(self).__name__} must define loss(self, model, batch).")

    def train_step(self, step: TrainStep) -> float | None:
        """Compute one training step; override it where a step is more than one loss and one update.

        Alternate updates (GANs), several backward passes (SAM, gradient surgery), inner loops and losses over the whole
        batch are written with the methods of ``step``, under the strategies single, ddp, zero1 and fsdp. :meth:`loss`
        remains what evaluations and ``paceline plan`` compute.

        Returns:
            The step's loss in logs and metrics, the same on all ranks; None: the loss of the last pass.
        """
        loss = step.backward(self.loss)
        step.update()
        return loss

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Return an evaluation batch's contributions to the metrics, by name.

        A 1-d tensor is one value for each sample; a pair ``(sum, weight)`` is added up; for a
        name in :meth:`build_metrics`, the arguments of that torchmetrics object's ``update``.
        """
        return {}

    def build_metrics(self) -> Mapping[str, Any]:
        """Return torchmetrics objects, by name, for metrics that do not decompose (AUROC)."""
        return {}

    def recommended_batch_size(self) -> int:
        """Return the global batch size to use if neither the options nor ``defaults`` set one."""
        return 64

    def tensor_parallel_plan(self, model: nn.Module) -> Mapping[str, ParallelStyle] | None:
        """Return how ``--strategy tp`` splits the model's layers, or None to infer the plan.

        Module name (with ``*`` for any) -> a style of ``torch.distributed.tensor.parallel``, as ``parallelize_module``
        takes them. Modules without an entry are not split.
        """
        return None

    def sequence_parallel_plan(self, model: nn.Module) -> Mapping[str, ParallelStyle] | None:
        """Return how ``--strategy tp --sequence-parallel`` splits the model, or None if it cannot.

        As :meth:`tensor_parallel_plan`, and the layers between the split ones, such as norms, compute parts of the
        sequence.
        """
        return None

    def build_callback(self, model: nn.Module, schedule: RunSchedule) -> Callback | None:
        """Return the callback of the training; called after the model is built, before the optimizers."""
        return None

    def pipeline_blocks(self, model: nn.Module) -> Sequence[Any] | None:
        """Return the sequential parts of the model's forward, for ``--strategy pp``.

        Each is a module, or a pair of a function and a list of the modules and parameters that it uses. The
        first receives the model's arguments, each later one the previous one's output (a tuple is unpacked). None:
        Paceline finds them by tracing the model's forward.
        """
        return None

    def inference_signature(self, model: nn.Module) -> InferenceSignature | None:
        """Return the function that export, serving and analysis use.

        ``model`` is in evaluation mode; the returned module contains it. None: the model cannot be exported.
        """
        return None

    def inference_batch(self, batch: Any) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
        """Split a dataset's batch into inputs of :meth:`inference_signature`'s module and expected outputs.

        Returns:
            The inputs in their order; and each sample's class, int64 (B,), or a regression's true value,
            floating point (B,) or (B, 1), or None for a task with neither.
        """
        raise TaskError(
            f"{type(self).__name__} defines inference_signature and must define inference_batch(self, batch)."
        )

    def on_batch_begin(self, info: BatchInfo) -> None:
        """Receive the position of the batch with which :meth:`loss` or :meth:`metrics` is called next.

        A loss that depends on the time, such as annealing or a curriculum, must follow ``info.step`` or
        ``info.progress``: a counter in the task counts the micro-batches of this rank only.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the task's own state, which is saved and transferred with the model; empty by default.

        It must be equal on all ranks, so only callbacks may change it. Tensors, numbers, text, and lists and dicts of
        them.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned; called only if it was not empty."""

    def sample_lengths(self, dataset: Any) -> Any:
        """Return the length of each training sample, or None if all are alike.

        Whole numbers in the dataset's order: tokens, pixels, points. The micro-batches of a step then have equal
        numbers of samples and about equal total lengths. ``dataset`` is the map-style dataset that
        :meth:`build_dataset` returned for "train".
        """
        return None

    def collate(self, samples: list[Any]) -> Any:
        """Turn a list of samples into a batch; the default is ``torch.utils.data.default_collate``."""
        from torch.utils.data import default_collate

        return default_collate(samples)
