"""Evaluation: metrics with confidence intervals, equal for any number of ranks."""

from __future__ import annotations

import base64
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from paceline.core.config import RunConfig
from paceline.core.errors import DataError, TaskError
from paceline.core.task import BatchInfo, Callback, Loss, LossResult, Task
from paceline.data.loader import EvalBatches
from paceline.data.samples import MicroBatch
from paceline.parallel.grad_buffers import read_numbers
from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.world import ParallelDims, World
from paceline.runs.monitor import Monitor
from paceline.training.control import Deadline, ModelSelector, StopCause
from paceline.training.reproducibility import seed_evaluation
from paceline.training.state import TrainingState

# --- Metrics that do not decompose into sums (AUROC, F1): torchmetrics objects that see a whole split ---


_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}


class FullSplitMetrics:
    """The task's torchmetrics objects, which take in every block on every rank, in the blocks' order.

    torchmetrics would add up the ranks' states instead: sums of floats that depend on the number of
    ranks, and states of different types where a rank has no block, which abort the process.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task = type(task).__name__
        self._device = device
        self._metrics = {name: metric.to(device) for name, metric in task.build_metrics().items()}
        self.names = frozenset(self._metrics)
        for metric in self._metrics.values():
            for part in metric.modules():
                part.distributed_available_fn = _nothing_to_gather

    def reset(self) -> None:
        """Begin a split."""
        for metric in self._metrics.values():
            metric.reset()

    def update(self, world: World, arguments: Mapping[str, Any] | None) -> None:
        """Add a batch of each rank, in the order of ranks; all ranks call this together.

        Args:
            arguments: of each metric's ``update``, by name; None if this rank has no more batches.

        Raises:
            TaskError: arguments are not a tuple, or hold values that cannot be sent to other ranks.
        """
        if not self.names:
            return
        for name, value in (arguments or {}).items():
            if not isinstance(value, tuple):
                raise TaskError(
                    f"{self._task}.metrics gave a {type(value).__name__} for {name!r}; it must be a tuple, "
                    f"the arguments of the update() of build_metrics()[{name!r}]."
                )
        gathered: list[Any] = [arguments]
        if world.world_size > 1:
            encoded = world.all_gather_object(None if arguments is None else self._encoded(arguments))
            gathered = [_decoded(value, self._device) for value in encoded]
        for of_rank in gathered:
            for name, value in (of_rank or {}).items():
                self._metrics[name].update(*value)

    def compute(self) -> dict[str, float]:
        """Return the metrics of all batches, the same on every rank.

        Raises:
            TaskError: a metric is not one number.
        """
        return {name: self._number(name, metric.compute()) for name, metric in self._metrics.items()}

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return float(value)
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise TaskError(
            f"{self._task}.build_metrics: {name!r} computes {what}; it must be one number. "
            "Choose an average, such as average='macro'."
        )

    def _encoded(self, value: Any) -> Any:
        """Convert a value to JSON types; lists stay lists, other nested values become pairs."""
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().reshape(-1)
            data = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()
            return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), data]}
        if isinstance(value, Mapping):
            return {"mapping": {name: self._encoded(inner) for name, inner in value.items()}}
        if isinstance(value, list | tuple):
            return [self._encoded(inner) for inner in value]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TaskError(
            f"{self._task}.metrics gave a {type(value).__name__} to a metric of build_metrics(); with "
            "several processes it can take tensors, numbers, text, and lists and dicts of them."
        )


def _nothing_to_gather() -> bool:
    return False


def _decoded(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_decoded(inner, device) for inner in value]
    if not isinstance(value, dict):
        return value
    if "mapping" in value:
        return {name: _decoded(inner, device) for name, inner in value["mapping"].items()}
    name, shape, data = value["tensor"]
    content = bytearray(base64.b64decode(data))
    if not content:
        return torch.empty(shape, dtype=_DTYPES[name], device=device)
    return torch.frombuffer(content, dtype=_DTYPES[name]).reshape(shape).to(device)


# --- Exact evaluation: the same numbers for any number of processes ---


_GLANCE_S = 0.5


@contextmanager
def preserve_modes(module: nn.Module) -> Iterator[None]:
    """Give each module of a model its mode back at the end, also after an error: a script may have frozen some."""
    was_training = module.training
    modes = [(inner, inner.training) for inner in module.modules()]
    try:
        yield
    finally:
        module.train(was_training)  # which a model may override, to do more
        for inner, mode in modes:
            inner.training = mode


Observe = Callable[[MicroBatch, Mapping[str, Any]], None]
"""Receives each batch after its evaluation, with the task's ``metrics`` for it."""


class EvaluationStopped(Exception):
    """The ranks left an evaluation together, before its end, because of a stop request.

    Attributes:
        cause: the highest of all ranks.
    """

    def __init__(self, cause: StopCause) -> None:
        super().__init__(cause)
        self.cause = cause


class Evaluator:
    """Evaluates a split in fixed batches, which are distributed over the ranks.

    Each batch's sums are kept apart and added exactly (``math.fsum``), so neither the number of ranks nor the order of
    the batches matters. Rank r of W takes the batches r, r + W, r + 2 W, ...; spares take none.

    Args:
        task: whose ``metrics`` and ``loss`` are evaluated.
        autocast: makes a fresh context of the precision to evaluate in.
        with_loss: add the task's loss to the metrics, where these do not have one.
    """

    def __init__(
        self,
        task: Task,
        device: torch.device,
        batches: EvalBatches,
        *,
        seed: int,
        autocast: Callable[[], AbstractContextManager[Any]],
        split: str = "val",
        with_loss: bool = True,
    ) -> None:
        self._task = task
        self._with_loss = with_loss
        self._batches = batches
        self._seed = seed
        self._autocast = autocast
        self._split = split
        self._whole = FullSplitMetrics(task, device)

    @property
    def num_samples(self) -> int:
        """Return the number of samples of the split."""
        return self._batches.num_samples

    @torch.no_grad()
    def run(
        self,
        mesh: ParallelDims,
        module: nn.Module,
        stop: Callable[[], StopCause],
        *,
        is_collective: bool = False,
        observe: Observe | None = None,
        most_batches: int | None = None,
    ) -> dict[str, float]:
        """Metrics by name, among them ``loss``. All ranks evaluate together; modules keep their mode.

        Args:
            stop: called after each batch; if it returns a cause on any rank, all of them stop.
            is_collective: whether all ranks must call the model together: a rank without a batch then repeats its last
                one and discards the result.
            observe: receives each of this rank's batches, in the run's precision.
            most_batches: of each rank; None: the whole split.

        Raises:
            EvaluationStopped: they stopped.
            TaskError: the task's metrics have a wrong type.
            PeerLostError: a rank is gone.
        """
        world, data = mesh.world, mesh.data
        self._whole.reset()
        num_blocks = self._batches.num_batches
        computing = data.num_active
        mine = range(data.rank, num_blocks, computing)[:most_batches] if data.rank < computing else range(0)
        rounds = -(-num_blocks // computing) if most_batches is None else min(most_batches, -(-num_blocks // computing))
        own = len(mine)
        blocks = self._batches.read([*mine, *[num_blocks - 1] * (rounds - own if is_collective else 0)])
        sums: dict[str, list[Pair]] = {}
        began, glance_at = time.perf_counter(), 1
        with preserve_modes(module):
            for number in range(rounds):
                if number == glance_at:
                    # Rank 0 says when to look again, so that all do so after the same block. A GPU is awaited, or it
                    # would lag behind by more and more of them.
                    _read(sums)
                    round_s = (time.perf_counter() - began) / number
                    seen = world.all_gather_object([stop(), max(1, int(_GLANCE_S / round_s))])
                    glance_at += seen[0][1]
                    asked = StopCause(max(of_rank[0] for of_rank in seen))
                    if asked:
                        raise EvaluationStopped(asked)
                arguments = None
                world.progress_tracker.move("evaluation")
                batch = next(blocks, None)
                if batch is not None:
                    module.eval()  # the task's metrics may have left it in training mode
                    seed_evaluation(self._seed, batch.index)
                    self._task.on_batch_begin(
                        BatchInfo(split=self._split, step=0, number=batch.index, samples=batch.num_samples)
                    )
                    with self._autocast(), translate_peer_errors():
                        pairs, arguments = self._batch(module, batch, observe)
                    if number >= own or not mesh.is_replica_leader:
                        pairs, arguments = {}, None
                    for name, pair in pairs.items():
                        sums.setdefault(name, []).append(pair)
                self._whole.update(world, arguments)
        return _totals(world, sums) | self._whole.compute()

    def close(self) -> None:
        """End the split's data workers."""
        self._batches.close()

    def _batch(
        self, module: nn.Module, microbatch: MicroBatch, observe: Observe | None
    ) -> tuple[dict[str, Pair], dict[str, Any]]:
        """Return one batch's (sum, weight) by name, and the arguments of torchmetrics objects, by name."""
        batch, samples = microbatch.batch, microbatch.num_samples
        values = self._task.metrics(module, batch)
        own = {n: v for n, v in values.items() if n not in self._whole.names}
        pairs = as_pairs(f"{type(self._task).__name__}.metrics", own, samples)
        arguments = {name: value for name, value in values.items() if name in self._whole.names}
        if self._with_loss and "loss" not in values:
            loss, said = split_values(self._task.loss(module, batch))
            total = as_loss(self._task, loss, samples)
            own = {n: v for n, v in said.items() if n not in values}
            pairs |= as_pairs(f"{type(self._task).__name__}.loss", own, samples)
            pairs["loss"] = (_number(total.sum), _number(total.weight))
        if observe is not None:
            observe(microbatch, values)
        return pairs, arguments


_Number = torch.Tensor | float
Pair = tuple[_Number, _Number]
"""The sum and the weight of a batch; a GPU's are tensors until :func:`_read`."""


def as_pairs(where: str, values: Mapping[str, Any], samples: int) -> dict[str, Pair]:
    """Return the sums and weights of a batch's values.

    Args:
        where: the method that returned them.
        values: by name, one for each sample or (sum, weight).

    Raises:
        TaskError: a value is neither.
    """
    return {name: _as_pair(where, name, value, samples) for name, value in values.items()}


def _as_pair(where: str, name: str, value: Any, samples: int) -> Pair:
    if isinstance(value, torch.Tensor) and value.shape == (samples,):
        return _number(value.double().sum()), float(samples)
    if isinstance(value, tuple) and len(value) == 2:
        return _number(value[0]), _number(value[1])
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise TaskError(
        f"{where} gave {what} for {name!r} in a batch of {samples} samples; "
        "it must be a 1-d tensor with one value a sample, or a pair (sum, weight)."
    )


def _number(value: Any) -> _Number:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if value.is_cuda:
            copied: torch.Tensor = value.to(torch.float64, copy=True).reshape(())
            return copied
    return float(value)


def _read(sums: dict[Any, list[Pair]]) -> None:
    """Turn what is a tensor in some pairs into numbers, with one wait for the GPU."""
    numbers = iter(read_numbers([number for pairs in sums.values() for pair in pairs for number in pair]))
    for name, pairs in sums.items():
        sums[name] = [(next(numbers), next(numbers)) for _ in pairs]


def _totals(world: World, sums: dict[str, list[Pair]]) -> dict[str, float]:
    _read(sums)
    gathered = world.all_gather_object(sums)
    metrics = {}
    for name in dict.fromkeys(name for of_rank in gathered for name in of_rank):
        pairs = [pair for of_rank in gathered for pair in of_rank.get(name, ())]
        metrics[name] = _mean(pairs)
    return metrics


def mean_values(world: World, values: Mapping[int, Mapping[str, Pair]]) -> dict[str, float]:
    """Return the means of values by name, over the micro-batches of all ranks; all call this together.

    Args:
        values: of this rank's micro-batches, by micro-batch and name. Each counts once, also where several ranks share
            a model replica.
    """
    own = {(number, name): [pair] for number, pairs in values.items() for name, pair in pairs.items()}
    _read(own)
    gathered = world.all_gather_object([[*key, *pair] for key, (pair,) in own.items()])
    by_name: dict[str, dict[int, tuple[float, float]]] = {}
    for number, name, value, weight in (row for of_rank in gathered for row in of_rank):
        by_name.setdefault(name, {})[number] = value, weight
    return {name: _mean(list(by_name[name].values())) for name in sorted(by_name)}


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the mean of (sum, weight); exact, so the order does not matter."""
    is_finite = all(map(math.isfinite, itertools.chain.from_iterable(pairs)))
    value, weight = map(math.fsum if is_finite else sum, zip(*pairs, strict=True))
    return value / weight if weight else math.nan


def split_values(result: LossResult) -> tuple[torch.Tensor | Loss, Mapping[str, Any]]:
    """Return the loss, and the values that came with it."""
    if isinstance(result, tuple) and not isinstance(result, Loss) and len(result) == 2:
        loss, values = result
        if isinstance(values, Mapping):
            return loss, values
    return result, {}


def as_loss(task: Task, value: Any, samples: int) -> Loss:
    """Convert a loss to sum and weight; a mean over ``samples`` samples is multiplied by their number.

    Raises:
        TaskError: it is neither a scalar tensor nor a :class:`Loss`.
    """
    value, _ = split_values(value)
    loss = value if isinstance(value, Loss) else None
    total = value if loss is None else loss.sum
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        what = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, torch.Tensor) else type(total).__name__
        raise TaskError(
            f"{type(task).__name__}.loss returned {'' if loss is None else 'a Loss whose sum is '}{what}; "
            "it must return the mean loss of the batch as a scalar tensor, or paceline.Loss(sum, weight); or a pair of "
            "either and a dict of values to record."
        )
    if loss is not None:
        return loss
    # Multiplied in float32: bfloat16 has only 8 bits for the product.
    return Loss((total.float() if total.dtype.itemsize < 4 else total) * samples, float(samples))


# --- The evaluations that a run makes while it trains, and what follows from them ---


class Validation:
    """On the validation split.

    Args:
        evaluator: of the split; None where the task has none.
        config: says which evaluation is the best.
        deadline: learns how long evaluations take.

    Attributes:
        metrics: of the last evaluation that was applied, as they were judged.
    """

    def __init__(self, evaluator: Evaluator | None, config: RunConfig, deadline: Deadline) -> None:
        self.metrics: Mapping[str, float] = {}
        self._evaluator = evaluator
        self._deadline = deadline
        self._selector = ModelSelector(config)

    @property
    def exists(self) -> bool:
        """Whether the task has a validation split."""
        return self._evaluator is not None

    def measure(
        self,
        mesh: ParallelDims,
        state: TrainingState,
        monitor: Monitor,
        stop: Callable[[], StopCause],
        *,
        is_collective: bool = False,
    ) -> dict[str, float]:
        """Return the metrics of the state's model, by name; see :meth:`Evaluator.run`. Nothing changes.

        Raises:
            EvaluationStopped: there was a stop request.
        """
        assert self._evaluator is not None
        monitor.set_status("evaluating val")
        began = time.monotonic()
        state.callback.on_eval_begin("val", state.evaluated_module)
        try:
            return self._evaluator.run(mesh, state.evaluated_module, stop, is_collective=is_collective)
        finally:
            self._deadline.evaluation_took(time.monotonic() - began)

    def rehearse(self, mesh: ParallelDims, state: TrainingState, *, is_collective: bool) -> None:
        """Evaluate one batch of each rank, and look up the metrics that options name.

        Raises:
            DataError: the split is empty.
            ConfigError: the task has no such metric.
            TaskError: the task's metrics have a wrong type.
        """
        assert self._evaluator is not None
        if not self._evaluator.num_samples:
            raise DataError(
                'build_dataset("val") returned a dataset without samples. Return None to train without evaluations.'
            )
        hooks = type(state.callback)
        if hooks.on_eval_begin is not Callback.on_eval_begin:
            return  # the metrics may need what it prepares
        metrics = self._evaluator.run(
            mesh, state.evaluated_module, lambda: StopCause.NONE, is_collective=is_collective, most_batches=1
        )
        if hooks.on_eval_end is Callback.on_eval_end:  # it may add metrics
            self._selector.require(metrics)

    def apply(self, measured: Mapping[str, float], state: TrainingState, monitor: Monitor) -> bool:
        """Update plateau schedules, early stopping and the best model; return whether the model is the best so far."""
        metrics = self.metrics = state.callback.on_eval_end("val", measured)
        progress = state.progress
        progress.evaluated_step = progress.step
        progress.measured = {}
        progress.version += 1
        improved = self._selector.apply(metrics, progress)
        state.step_plateaus(self._selector.value(metrics))
        epoch = progress.epoch - 1 if progress.step_in_epoch == 0 else progress.epoch
        monitor.on_eval_end("val", progress.step, epoch, metrics)
        return improved

    def close(self) -> None:
        """Close the split."""
        if self._evaluator is not None:
            self._evaluator.close()
