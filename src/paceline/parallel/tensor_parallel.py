"""Tensor parallelism, and randomness that does not depend on the split."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import Optimizer

from paceline.core.errors import ConfigError, TaskError
from paceline.core.task import Task
from paceline.data.order import derive_key
from paceline.data.samples import MicroBatch
from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.sharded_state import (
    clip_gradients,
    explain_dtensor_mixing,
    gather_full,
    require_no_hook,
    require_own_memory,
)
from paceline.parallel.strategy import MicrobatchWork, ReducerStrategy
from paceline.parallel.tp_autoplan import (
    describe_tp_plan,
    find_tied_parameters,
    infer_tp_plan,
    is_shard,
    require_equal_parts,
    require_whole_heads,
    tp_plan_from_task,
)
from paceline.parallel.world import ParallelDims
from paceline.torch_internals import REDISTRIBUTE_LOGGER

# --- Randomness in split parts of a model ---


_TAG = 15  # distinct from those of paceline.training.reproducibility


class ShardedRNGTracker:
    """Makes ranks draw different numbers for split activations, and equal numbers elsewhere.

    All ranks of a model replica begin a micro-batch with the same generator. From a layer that splits its output to the
    layer that consumes it, each rank uses a generator derived from the common one's state, the layer and the rank; then
    it restores the common one. Draws outside of split parts are therefore those of one process.

    Args:
        begins: the layers with split outputs.
        ends: the layers with split inputs.
        rank: among the ranks that share the layers.
        everywhere: activations are split (along the sequence) in the whole model.
    """

    def __init__(
        self,
        module: nn.Module,
        begins: Iterable[nn.Module],
        ends: Iterable[nn.Module],
        rank: int,
        *,
        everywhere: bool,
    ) -> None:
        self._rank = rank
        self._common: list[torch.Tensor] = []
        if everywhere:
            module.register_forward_pre_hook(lambda *_: self._enter_split(0))
            module.register_forward_hook(lambda *_: self._leave_split(), always_call=True)
            return
        module.register_forward_pre_hook(lambda *_: self._common.clear())
        for number, layer in enumerate(begins):
            layer.register_forward_hook(self._split_hook(number))
        for layer in ends:
            layer.register_forward_pre_hook(lambda *_: self._leave_split())

    def _split_hook(self, number: int) -> Any:
        return lambda layer, *_: self._enter_split(number) if layer.training and not self._common else None

    def _enter_split(self, number: int) -> None:
        self._common = [torch.get_rng_state()]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._common.append(torch.cuda.get_rng_state())
        digest = hashlib.blake2b(digest_size=8)
        for state in self._common:
            digest.update(state.numpy().tobytes())
        key = derive_key(int.from_bytes(digest.digest(), "little") >> 1, _TAG, number, self._rank)
        # torch.manual_seed() also probes every other kind of accelerator.
        torch.default_generator.manual_seed(key)
        if len(self._common) > 1:
            torch.cuda.manual_seed(key)

    def _leave_split(self) -> None:
        if self._common:
            torch.set_rng_state(self._common[0])
            for state in self._common[1:]:
                torch.cuda.set_rng_state(state)
            self._common.clear()


# --- Tensor parallelism by torch's ``parallelize_module`` ---
#
# The ranks of a model replica compute the same samples together: Shoeybi et al., "Megatron-LM: Training
# Multi-Billion Parameter Language Models Using Model Parallelism", 2019.


_log = logging.getLogger(__name__)


class TensorParallel:
    """Splits a model's layers over the ranks of the mesh's ``tp`` axis.

    Args:
        task: the task; without a plan of its own, the plan is inferred.
        along_sequence: also split the layers in between, by the task's sequence_parallel_plan.
    """

    is_collective = True
    saves_shards = False

    def __init__(self, mesh: ParallelDims, task: Task, *, along_sequence: bool) -> None:
        if mesh.device_mesh is None:
            raise ConfigError("--strategy tp splits layers over processes, but there is one. Use --strategy single.")
        self._world = mesh.world
        self._mesh = mesh.device_mesh["tp"]
        self._task = task
        self._along_sequence = along_sequence
        self._plan: dict[str, ParallelStyle] = {}

    @property
    def degree(self) -> int:
        """The number of ranks that share a layer."""
        return self._mesh.size()

    def place(self, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        module = build()
        require_own_memory("tp", module)
        self.decide(module)
        module.to(device)
        for name, parameter in module.named_parameters():
            require_no_hook("tp", name, parameter)
        # The task may build the model with randomness that Paceline does not seed.
        self._world.broadcast_module(module)
        self.split(module)
        return module

    def decide(self, module: nn.Module) -> dict[str, bool]:
        """Choose the plan for :meth:`split`.

        Returns:
            The parameters, in the model's order, of layers with split outputs (True) and with split inputs (False).

        Raises:
            ConfigError: the layers cannot be divided by the number of ranks.
            TaskError: the task's plan does not fit its model.
        """
        self._plan = self._choose_plan(module)
        first = {id(parameter): name for name, parameter in reversed([*module.named_parameters()])}
        return {
            first[id(parameter)]: _splits_output(style)
            for name, layer in module.named_modules()
            if (style := self._plan.get(name)) and (_splits_output(style) or _takes_split_input(style))
            for parameter in layer.parameters()
        }

    def split(self, module: nn.Module) -> None:
        """Split the layers of this stage, whose parameters are not on the ``meta`` device."""
        layers = {name: module.get_submodule(name) for name in self._plan}
        local_plan = {name: style for name, style in self._plan.items() if _is_local(layers[name])}
        shared = find_tied_parameters(module)
        try:
            # Every rank has the full parameters, so no broadcast is needed.
            parallelize_module(module, self._mesh, local_plan, src_data_rank=None)
        except NotImplementedError as error:
            raise TaskError(f"{type(self._task).__name__}.tensor_parallel_plan: {error}") from error
        _tie(module, shared)
        require_equal_parts(module, self.degree)
        ShardedRNGTracker(
            module,
            [layers[name] for name, style in self._plan.items() if _splits_output(style)],
            [layers[name] for name, style in self._plan.items() if _takes_split_input(style)],
            self._mesh.get_local_rank(),
            everywhere=self._along_sequence,
        )
        for name, style in local_plan.items():
            if isinstance(style, RowwiseParallel) and any(map(is_shard, style.output_layouts)):
                check = _length_check(name, style.output_layouts[0], self.degree)
                layers[name].register_forward_pre_hook(check)
        _silence_split_warnings()
        # A transformer layer's fast path in evaluations reads its layers' weights directly.
        torch.backends.mha.set_fastpath_enabled(False)
        if self._world.rank == 0:
            _log.info("%s", describe_tp_plan(module, self._plan, self.degree))

    def wrap_optimizers(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Optimizer]:
        return optimizers  # their state follows the parameters

    def make_ema_model(self, build: Callable[[], nn.Module], like: nn.Module, device: torch.device) -> nn.Module:
        raise AssertionError("layers that are split have no moving average")

    def full(self, state: Any, *, keep: bool) -> Any:
        return gather_full(state, keep=keep)

    def clip_gradients(self, module: nn.Module, max_norm: float) -> torch.Tensor:
        return clip_gradients(module.parameters(), max_norm)

    def _choose_plan(self, module: nn.Module) -> dict[str, ParallelStyle]:
        task = self._task
        if self._along_sequence:
            plan_of_task, source = task.sequence_parallel_plan(module), "sequence_parallel_plan"
            if plan_of_task is None:
                raise ConfigError(
                    f"--sequence-parallel: {type(task).__name__} has no sequence_parallel_plan. "
                    "Leave the option out, or write sequence_parallel_plan(self, model)."
                )
        else:
            plan_of_task, source = task.tensor_parallel_plan(module), "tensor_parallel_plan"
        if plan_of_task is None:
            return infer_tp_plan(module, self._mesh.size())
        plan = tp_plan_from_task(plan_of_task, module, f"{type(task).__name__}.{source}")
        require_whole_heads(module, plan, self._mesh.size())
        return plan


class TP(ReducerStrategy):
    """Every rank of a model replica computes the replica's micro-batches, each with its part of the layers.

    The reducer sums a rank's part of the gradients over the replicas.
    """

    def run_microbatches(self, microbatches: Sequence[MicroBatch], work: MicrobatchWork) -> None:
        activity = self._mesh.world.progress_tracker
        # Each layer communicates in forward and backward.
        activity.begin_collective("all-reduce")
        with translate_peer_errors(), explain_dtensor_mixing():
            super().run_microbatches(microbatches, work)
        activity.end_collective()


def _tie(module: nn.Module, shared: Mapping[int, Sequence[tuple[str, str]]]) -> None:
    """Restore the sharing of parameters that were split separately."""
    for places in shared.values():
        (first, first_name), *rest = places
        shared_parameter = getattr(module.get_submodule(first), first_name)
        for name, other in rest:
            layer = module.get_submodule(name)
            tied = getattr(layer, other)
            if getattr(tied, "placements", None) != getattr(shared_parameter, "placements", None):
                raise TaskError(
                    f"tensor_parallel_plan splits {first!r} and {name!r} in two ways, but they share "
                    f"{first_name!r}. Split both alike, or neither."
                )
            layer.register_parameter(other, shared_parameter)


def _silence_split_warnings() -> None:
    """Silence two irrelevant warnings of torch about split layers, with fsdp among others.

    Outputs of split layers are views of distributed tensors, which nothing changes in place; a state is gathered in two
    steps, which add nothing.
    """
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger(REDISTRIBUTE_LOGGER).setLevel(logging.ERROR)


def _length_check(name: str, output: Any, degree: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """Return a hook that rejects a sequence whose length the ranks cannot share equally."""

    def check(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        length = inputs[0].shape[output.dim]
        remainder = length % degree
        if remainder:
            raise TaskError(
                f"--sequence-parallel: {degree} processes cannot share a sequence of {length} equally (in "
                f"{name!r}). Use a length of {length - remainder} or {length - remainder + degree}."
            )

    return check


def _is_local(layer: nn.Module) -> bool:
    parameters = list(layer.parameters())
    return not parameters or any(not parameter.is_meta for parameter in parameters)


def _splits_output(style: ParallelStyle) -> bool:
    return isinstance(style, ColwiseParallel) and all(map(is_shard, style.output_layouts))


def _takes_split_input(style: ParallelStyle) -> bool:
    return isinstance(style, RowwiseParallel) and all(map(is_shard, style.input_layouts))
