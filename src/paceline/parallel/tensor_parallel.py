"""Tensor parallelism, and random numbers that do not depend on the split."""

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
from paceline.parallel.gradient_norm import clip_gradients
from paceline.parallel.microbatches import ReducerStrategy
from paceline.parallel.sharded_state import explain_dtensor_mixing, gather_full
from paceline.parallel.strategy import MicrobatchWork
from paceline.parallel.tp_autoplan import (
    describe_tp_plan,
    find_tied_parameters,
    infer_tp_plan,
    is_shard,
    require_equal_parts,
    require_whole_heads,
    tp_plan_from_task,
)
from paceline.parallel.world import ParallelDims, translate_peer_errors

# --- Randomness in the parts of a model where each rank of a tensor-parallel copy holds other features ---


_TAG = 15  # beside those of paceline.training.reproducibility


class ShardedRNGTracker:
    """Has the ranks draw different numbers where they hold different parts, and else the same.

    All ranks of a copy begin a micro-batch with the same generator. From a layer that splits its output to the
    one that takes the parts in, each goes on with a generator of its own, which follows from where the
    common one stands, from the layer and from the rank; then with the common one, as if nothing had been
    drawn. So what is drawn outside of split parts is what one process draws.

    Args:
        module: the model.
        begins: the layers whose output is split.
        ends: the layers that take a split input in.
        rank: among the ranks that share the layers.
        everywhere: activations are split (along the sequence) in all of the model.
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
            module.register_forward_pre_hook(lambda *_: self._part(0))
            module.register_forward_hook(lambda *_: self._join(), always_call=True)
            return
        module.register_forward_pre_hook(lambda *_: self._common.clear())
        for number, layer in enumerate(begins):
            layer.register_forward_hook(self._after(number))
        for layer in ends:
            layer.register_forward_pre_hook(lambda *_: self._join())

    def _after(self, number: int) -> Any:
        return lambda layer, *_: self._part(number) if layer.training and not self._common else None

    def _part(self, number: int) -> None:
        self._common = [torch.get_rng_state()]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._common.append(torch.cuda.get_rng_state())
        digest = hashlib.blake2b(digest_size=8)
        for state in self._common:
            digest.update(state.numpy().tobytes())
        key = derive_key(int.from_bytes(digest.digest(), "little") >> 1, _TAG, number, self._rank)
        # torch.manual_seed() also looks for every other kind of accelerator.
        torch.default_generator.manual_seed(key)
        if len(self._common) > 1:
            torch.cuda.manual_seed(key)

    def _join(self) -> None:
        if self._common:
            torch.set_rng_state(self._common[0])
            for state in self._common[1:]:
                torch.cuda.set_rng_state(state)
            self._common.clear()


# --- Tensor parallelism by torch's ``parallelize_module``: each layer is split over the ranks ---
#
# The ranks of a copy of the model compute the same samples together: Shoeybi et al., "Megatron-LM: Training
# Multi-Billion Parameter Language Models Using Model Parallelism", 2019.


_log = logging.getLogger(__name__)


class TensorParallel:
    """Splits a model's layers over the ranks of the mesh's ``tp`` axis.

    Args:
        mesh: the ranks.
        task: whose plan is followed; without one, the layers are found.
        along_sequence: also split what lies between the layers, as the task says.
    """

    is_collective = True

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
        """How many ranks share a layer."""
        return self._mesh.size()

    def place(self, module: nn.Module, device: torch.device) -> nn.Module:
        self.decide(module)
        module.to(device)
        # A model may be built with randomness that no seed of torch's reaches.
        self._world.broadcast_module(module)
        self.split(module)
        return module

    def decide(self, module: nn.Module) -> dict[str, bool]:
        """How the layers are to be split, which :meth:`split` then does.

        Returns:
            The parameters, in the model's order, of layers whose output is split (True) and of those that
            take such an output in (False).

        Raises:
            ConfigError: they cannot be shared by so many ranks.
            TaskError: the task's plan is not for its model.
        """
        self._plan = self._planned(module)
        first = {id(parameter): name for name, parameter in reversed([*module.named_parameters()])}
        return {
            first[id(parameter)]: _splits_output(style)
            for name, layer in module.named_modules()
            if (style := self._plan.get(name)) and (_splits_output(style) or _takes_split_input(style))
            for parameter in layer.parameters()
        }

    def split(self, module: nn.Module) -> None:
        """Split the layers that are here: those whose parameters are not on the ``meta`` device."""
        layers = {name: module.get_submodule(name) for name in self._plan}
        here = {name: style for name, style in self._plan.items() if _is_here(layers[name])}
        shared = find_tied_parameters(module)
        try:
            # Every rank has the whole; none has to be told.
            parallelize_module(module, self._mesh, here, src_data_rank=None)
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
        for name, style in here.items():
            if isinstance(style, RowwiseParallel) and any(map(is_shard, style.output_layouts)):
                check = _length_checked(name, style.output_layouts[0], self.degree)
                layers[name].register_forward_pre_hook(check)
        _hush()
        # A transformer layer's short cut in evaluations reads its layers' weights past their own code.
        torch.backends.mha.set_fastpath_enabled(False)
        if self._world.rank == 0:
            _log.info("%s", describe_tp_plan(module, self._plan, self.degree))

    def wrap_optimizers(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Optimizer]:
        return optimizers  # their state follows the parameters

    def make_ema_model(self, build: Callable[[], nn.Module], like: nn.Module, device: torch.device) -> nn.Module:
        raise AssertionError("layers that are split have no moving average")

    def full(self, state: Any, *, keep: bool) -> Any:
        return gather_full(state, keep=keep)

    def clip_gradients(self, module: nn.Module, max_norm: float) -> None:
        clip_gradients(module.parameters(), max_norm)

    def _planned(self, module: nn.Module) -> dict[str, ParallelStyle]:
        task = self._task
        if self._along_sequence:
            given, where = task.sequence_parallel_plan(module), "sequence_parallel_plan"
            if given is None:
                raise ConfigError(
                    f"--sequence-parallel: {type(task).__name__} does not say what lies along the sequence. "
                    "Leave it out, or write its sequence_parallel_plan(self, model)."
                )
        else:
            given, where = task.tensor_parallel_plan(module), "tensor_parallel_plan"
        if given is None:
            return infer_tp_plan(module, self._mesh.size())
        plan = tp_plan_from_task(given, module, f"{type(task).__name__}.{where}")
        require_whole_heads(module, plan, self._mesh.size())
        return plan


class TP(ReducerStrategy):
    """Every rank of a copy of the model computes the copy's micro-batches, each its part of the layers.

    What a rank holds of the gradients is summed over the copies, by the reducer.
    """

    def run_microbatches(self, microbatches: Sequence[MicroBatch], work: MicrobatchWork) -> None:
        activity = self._mesh.world.progress_tracker
        # Somewhere in each layer, forward and backward.
        activity.begin_collective("all-reduce")
        with translate_peer_errors(), explain_dtensor_mixing():
            super().run_microbatches(microbatches, work)
        activity.end_collective()


def _tie(module: nn.Module, shared: Mapping[int, Sequence[tuple[str, str]]]) -> None:
    """Have modules share again what they shared before each one's was split."""
    for places in shared.values():
        (first, own), *others = places
        kept = getattr(module.get_submodule(first), own)
        for name, other in others:
            layer = module.get_submodule(name)
            mine = getattr(layer, other)
            if getattr(mine, "placements", None) != getattr(kept, "placements", None):
                raise TaskError(
                    f"tensor_parallel_plan splits {first!r} and {name!r} in two ways, but they share "
                    f"{own!r}. Split both alike, or neither."
                )
            layer.register_parameter(other, kept)


def _hush() -> None:
    """Silence two warnings of torch about how it does, with fsdp beside, what is asked of it here.

    Outputs of split layers are views of distributed tensors, and nothing changes them in place; a state is
    gathered in two steps, which add nothing up.
    """
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def _length_checked(name: str, output: Any, degree: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """Refuses a sequence that the ranks cannot share equally: their parts would not fit together."""

    def check(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        length = inputs[0].shape[output.dim]
        over = length % degree
        if over:
            raise TaskError(
                f"--sequence-parallel: {degree} processes cannot share a sequence of {length} equally (in "
                f"{name!r}). Use a length of {length - over} or {length - over + degree}."
            )

    return check


def _is_here(layer: nn.Module) -> bool:
    parameters = list(layer.parameters())
    return not parameters or any(not parameter.is_meta for parameter in parameters)


def _splits_output(style: ParallelStyle) -> bool:
    return isinstance(style, ColwiseParallel) and all(map(is_shard, style.output_layouts))


def _takes_split_input(style: ParallelStyle) -> bool:
    return isinstance(style, RowwiseParallel) and all(map(is_shard, style.input_layouts))
