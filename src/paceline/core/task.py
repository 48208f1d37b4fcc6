"""The task: the class that a user writes, in plain PyTorch; its callbacks, and a training step of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

from paceline.core.errors import TaskError
from paceline.core.options import Interval

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.optim import Optimizer

    from paceline.core.inference import InferenceSignature


class Loss(NamedTuple):
    """A loss whose samples have different weights (tokens, ignored labels).

    Attributes:
        sum: scalar tensor, the sum of the losses; differentiable.
        weight: divisor of the total ``sum``, applied once after the sums of all micro-batches are added up.
    """

    sum: torch.Tensor
    weight: torch.Tensor | float


LossResult: TypeAlias = "torch.Tensor | Loss | tuple[torch.Tensor | Loss, Mapping[str, Any]]"
"""What a loss returns; the mapping has values for the run's records, as :meth:`Task.loss` describes."""


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

    def frozen_base(self) -> Mapping[str, str] | None:
        """Return what :meth:`build_model` reads, if that alone decides the parameters that are not trained.

        Checkpoints then leave out those without ``requires_grad``, which must keep their values. Called after
        :meth:`build_model`.

        Returns:
            The record that checkpoints and ``run.toml`` have instead: ``address``, for messages, and ``sha256``, of the
            content. None: checkpoints hold the whole model.
        """
        return None

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

    def loss(self, model: nn.Module, batch: Any) -> LossResult:
        """Return the mean loss over the batch's samples, or a :class:`Loss`.

        Or a pair of either and a dict of values to record, by name: a 1-d tensor is one value for each sample; a pair
        ``(sum, weight)`` is added up. The step's record has their means, with the same bits on any number of ranks.
        """
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

    def sample_weights(self, dataset: Any) -> Any:
        """Return the weight of each training sample, or None if an epoch has each sample once.

        Finite numbers of at least 0, in the dataset's order: a tensor, array or list. An epoch is then as many draws as
        there are samples, with replacement. A ``torch.utils.data.WeightedRandomSampler`` also says how many draws, and
        whether with replacement; its generator is not used. ``dataset`` is that of :meth:`sample_lengths`.
        """
        return None

    def collate(self, samples: list[Any]) -> Any:
        """Turn a list of samples into a batch; the default is ``torch.utils.data.default_collate``."""
        from torch.utils.data import default_collate

        return default_collate(samples)


# --- Hooks that a task may register for fixed points of its training ---


_EACH_EPOCH = Interval(epochs=1)


@dataclass(frozen=True, kw_only=True)
class RunSchedule:
    """The length of a run and its evaluation interval.

    Attributes:
        total_steps: of the whole run; None for a stream trained by epochs.
        steps_per_epoch: None for streams.
        epochs: of the whole run, of which the last may be cut short; None for a stream that ends by steps.
        eval_every: steps or epochs between two evaluations.
    """

    total_steps: int | None
    steps_per_epoch: int | None
    epochs: int | None = None
    eval_every: Interval = _EACH_EPOCH


@dataclass(frozen=True, kw_only=True)
class BatchInfo:
    """The position of a batch in its run, independent of which rank computes it.

    Attributes:
        split: "train", "val" or "test".
        step: training steps done before; 0 in evaluations.
        number: index of the micro-batch; in evaluations, of the evaluation batch.
        samples: number of samples in the batch; 0 if it has no weight.
        epoch: epochs done before, in training; None if the data is a stream.
        progress: ``step`` over the steps of the run, from 0 to below 1, in training; None if their number is unknown.
    """

    split: str
    step: int
    number: int
    samples: int
    epoch: int | None = None
    progress: float | None = None


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """This rank, its world, and where the run writes.

    Attributes:
        rank: this process's.
        local_rank: this process's, among those of its node.
        device: where the model is.
        directory: the run's.
        log_every: steps between two records.
        trains: whether it trains; else a trained model is evaluated, and nothing that a callback records is kept.
        gather: returns every rank's value (JSON types), by rank. It is a collective, and raises ``PeerLostError`` if a
            rank is lost.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    directory: Path
    log_every: int
    gather: Callable[[Any], list[Any]]
    trains: bool = True


class Callback:
    """Hooks that every rank calls at fixed points of a run; the base class does nothing.

    A callback is part of the run's state, so it must depend on nothing but the run: its state is saved and transferred
    with the model, and its decisions must be equal on all ranks. :meth:`Task.build_callback` builds it before the
    optimizers.

    Attributes:
        should_stop: set it to end the run after the current evaluation or epoch, as ``--early-stop`` does.
    """

    should_stop = False

    def attach(self, group: RankInfo, *, step: int, epoch: int) -> None:
        """Called when training begins or resumes in this group, and again after each change of the group."""

    def on_epoch_begin(self, epoch: int) -> None:
        """Called before epoch ``epoch``, counted from 0."""

    def on_step_begin(self, step: int, step_in_epoch: int) -> None:
        """Called before a step; ``step`` steps are done."""

    def on_gradients_reduced(self, *, due: bool) -> Mapping[str, float]:
        """Called when the gradients of all micro-batches are summed, before anything is updated.

        A parameter that no micro-batch of the step used has no gradient. Ranks may communicate here.

        Args:
            due: whether ``metrics.jsonl`` gets a record of this step.

        Returns:
            Numbers for the record, the same on all ranks; ignored unless ``due``.
        """
        return {}

    def on_before_optimizer_step(self) -> None:
        """Called with the gradients of the whole step, not yet clipped, before the optimizers."""

    def on_step_end(self, step: int, loss: float) -> None:
        """Called after a step.

        Args:
            step: steps done, including this one.
            loss: the step's mean loss.
        """

    def on_epoch_end(self, epoch: int) -> None:
        """Called after an epoch and its evaluation."""

    def on_eval_begin(self, split: str, module: nn.Module) -> None:
        """Called before an evaluation of ``module``, which may be a moving average. May be called more than once."""

    def on_eval_end(self, split: str, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Take the metrics of a whole split; return the metrics to select by and to record."""
        return metrics

    def on_fit_end(self) -> None:
        """Called after the last step."""

    def close(self) -> None:
        """Free resources; training may have been interrupted."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs: tensors, numbers, text, and lists and dicts of them."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""


# --- A step that the task computes itself: several passes over the micro-batches, and updates between them ---


LossFunction = Callable[["nn.Module", Any], LossResult]
"""Takes the model and a micro-batch, as :meth:`Task.loss` does."""


class TrainStep(Protocol):
    """One training step, which :meth:`Task.train_step` puts together from these parts.

    All ranks call the same methods in the same order: decide by equal values only, such as ``step``, the
    numbers that :meth:`backward` returns, and the gradients after it. Code between the calls draws the same random
    numbers on all ranks.

    Attributes:
        module: the model; the argument of a loss may be wrapped or compiled.
        optimizers: by name; "main" if the task returned a single one.
        step: steps done before.
        epoch: epochs done before; None if the data is a stream.
        progress: ``step`` over the steps of the run, from 0 to below 1; None if their number is unknown.
    """

    module: nn.Module
    optimizers: Mapping[str, Optimizer]
    step: int
    epoch: int | None
    progress: float | None

    def backward(self, loss: LossFunction) -> float:
        """Compute a loss and its gradient over the whole batch: one pass over the micro-batches.

        Afterwards ``parameter.grad`` is the mean gradient, with the same bits on all ranks; where no micro-batch of
        this pass used the parameter, it is None on all ranks. It lies in memory that the next pass overwrites: clone
        what you need later. Each pass draws random numbers of its own.

        Args:
            loss: called once for each micro-batch of this rank, such as ``self.loss``.

        Returns:
            The mean loss over the batch, the same on all ranks.

        Raises:
            NonFiniteLossError: the loss or the gradient is NaN or infinite.
        """

    def backward_over_batch(
        self, embed: Callable[[nn.Module, Any], torch.Tensor], loss: Callable[[torch.Tensor], torch.Tensor]
    ) -> float:
        """Compute a loss of the embeddings of the whole batch, such as a contrastive one, and its gradient.

        The embeddings of all micro-batches are computed and gathered; then their gradients pass through each
        micro-batch, which is recomputed from the same random numbers (Gao et al., "Scaling Deep Contrastive
        Learning Batch Size under Memory Limited Setup", 2021). So the model depends neither on the number of ranks
        nor, but for rounding, on that of micro-batches, and memory holds the activations of one micro-batch.

        Args:
            embed: returns a micro-batch's embeddings, (B, ...), one row for each sample.
            loss: takes the embeddings of all N samples, (N, ...), in the order of the batch; returns a scalar, the mean
                over the batch. Parameters that it uses directly get no gradient.

        Returns:
            The loss, the same on all ranks.

        Raises:
            ConfigError: the strategy shards the model.
            NonFiniteLossError: as :meth:`backward`.
            TaskError: ``embed`` returns no tensor with a row for each sample, or ``loss`` no scalar with a gradient.
        """

    def update(self, *names: str, clip_norm: float | None = None, closure: Callable[[], float] | None = None) -> None:
        """Step optimizers with the gradients as they are now.

        Learning-rate schedules and the moving average follow once, at the end of the step.

        Args:
            names: of the optimizers, in this order; by default all of them.
            clip_norm: the 2-norm to which the gradients of these optimizers' parameters are scaled down; by default
                ``--clip-norm``.
            closure: computes the loss again, by :meth:`backward`, for optimizers that need it, such as ``LBFGS``.
        """

    def log(self, **values: float) -> None:
        """Add numbers, the same on all ranks, to the step's record in ``metrics.jsonl``."""
