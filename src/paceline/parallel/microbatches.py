"""Strategies that compute one micro-batch after the other: base classes, one process, and DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.data.samples import MicroBatch
from paceline.parallel.grad_buffers import FlatLayout
from paceline.parallel.reducer import GradientReducer, StepSums, are_finite
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.parallel.sharded_state import local_shard
from paceline.parallel.strategy import MicrobatchWork, ParameterLayout, Replicated, StrategyOptions
from paceline.parallel.transports import Transport
from paceline.parallel.world import ParallelDims
from paceline.parallel.wrap_units import model_blocks
from paceline.torch_internals import call_after_backward, foreach_div_


class MicrobatchStrategy:
    """Computes this rank's micro-batches one by one; its :class:`GradientReducer` sums buffers, losses and rows.

    Attributes:
        engine: ``module:Class`` of the :class:`~paceline.training.group_context.Engine` that takes the steps; None:
            the one of synchronous training, :class:`~paceline.training.trainer.SyncEngine`.
        plan: the assignment of micro-batches to the ranks of ``mesh.data``.
        reducer: sums the contributions of the micro-batches.

    Args:
        module: the model, as placed on this rank.
        plan: the rank of ``mesh.data`` that computes each micro-batch.
        sums_gradients: whether the reducer also sums the gradients.
        transport: see :class:`GradientReducer`.
    """

    engine: str | None = None
    num_dummy_steps = 0
    moves_parameters = False
    overlaps_steps = False

    @classmethod
    def build_layout(cls, mesh: ParallelDims, config: RunConfig) -> ParameterLayout:
        """Return the layout of the model: complete on each rank, unless the strategy overrides it.

        Raises:
            ConfigError: the model cannot be laid out on this number of ranks.
        """
        return Replicated()

    def __init__(
        self,
        module: nn.Module,
        mesh: ParallelDims,
        plan: ReductionPlan,
        options: StrategyOptions,
        *,
        sums_gradients: bool,
        transport: Callable[[FlatLayout], Transport] | None = None,
    ) -> None:
        self.plan = plan
        self.module = module
        self.model: nn.Module = compile_model(module) if options.config.training.compile else module
        self.microbatches = plan.microbatches_of(mesh.data.rank)
        self.reducer = GradientReducer(
            module,
            plan,
            mesh.data,
            row_length=options.row_length,
            with_gradients=sums_gradients,
            transport=transport,
        )
        self._mesh = mesh

    @property
    def stats(self) -> Mapping[str, Any]:
        return {}

    def begin_step(self, present: Sequence[int]) -> None:
        self.reducer.begin(present)

    def run_microbatches(self, microbatches: Sequence[MicroBatch], work: MicrobatchWork) -> None:
        for microbatch in microbatches:
            self._begin_microbatch()
            loss = work.forward(self.model, microbatch)
            self.reducer.require_gradients()
            self.backward(work.scale_loss(loss.sum))
            self.reducer.end_microbatch(microbatch.num_samples, loss.weight, loss.sum, microbatch.checksum)
            work.backward_done()

    def run_dummy(self, loss: Callable[[nn.Module], torch.Tensor]) -> None:
        raise AssertionError("this strategy has no dummy micro-steps")

    def backward(self, loss: torch.Tensor) -> None:
        """Add the micro-batch's gradient of ``loss``, a sum over its samples."""
        loss.backward()  # type: ignore[no-untyped-call]

    def reduce(self, row: Sequence[float]) -> StepSums:
        return require_agreement(self.reducer.finish(row), row, self._mesh)

    def rollback(self) -> None:
        self.reducer.rollback()

    def close(self) -> None:
        self.reducer.close()

    def _begin_microbatch(self) -> None:
        self.reducer.begin_microbatch()


class ReducerStrategy(MicrobatchStrategy):
    """The reducer sums the gradients too (``--reduction exact`` or ``allreduce``)."""

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        plan = ReductionPlan(sum(options.work_split), mesh.data.world_size, options.reduction_order, options.work_split)
        super().__init__(module, mesh, plan, options, sums_gradients=True)


class ExternalReduceStrategy(MicrobatchStrategy):
    """Another library sums the gradients, in micro-steps that all ranks run together.

    A dummy micro-step gives gradients to the parameters that it uses, but does not count as a use of them.
    """

    def __init__(self, module: nn.Module, mesh: ParallelDims, plan: ReductionPlan, options: StrategyOptions) -> None:
        super().__init__(module, mesh, plan, options, sums_gradients=False)
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._micro_steps_left = 0
        self._microbatches_left = 0
        self._is_dummy = False

    def begin_step(self, present: Sequence[int]) -> None:
        self._micro_steps_left = self._count_micro_steps(present)
        self._microbatches_left = len(present)
        self.num_dummy_steps = self._micro_steps_left - len(present)
        for parameter in self._parameters:
            parameter.grad = None
        super().begin_step(present)

    def run_dummy(self, loss: Callable[[nn.Module], torch.Tensor]) -> None:
        self._begin_microbatch()
        self.backward(loss(self.model) * 0.0)

    def backward(self, loss: torch.Tensor) -> None:
        if not self._is_dummy:
            # Before the library adds what other ranks have used.
            loss.register_hook(lambda _: call_after_backward(self._mark_used))  # type: ignore[no-untyped-call]
        super().backward(loss)

    def _mark_used(self) -> None:
        """Tell the reducer which parameters this rank's micro-batches have used so far."""
        self.reducer.mark_used(parameter for parameter in self._parameters if parameter.grad is not None)

    def reduce(self, row: Sequence[float]) -> StepSums:
        sums = self.reducer.finish(row)
        if sums.weight > 0:
            gradients = local_gradients(self._parameters)
            self._take_mean(gradients, sums.weight)
            finite = sums.finite and are_finite(gradients)
            sums = replace(sums, finite=finite)
        return require_agreement(sums, row, self._mesh)

    def _count_micro_steps(self, present: Sequence[int]) -> int:
        """Return the number of forwards and backwards that all ranks run in this step."""
        return max(1, len(present))

    def _take_mean(self, gradients: list[torch.Tensor], weight: float) -> None:
        foreach_div_(gradients, weight)

    def _begin_microbatch(self) -> None:
        self._micro_steps_left -= 1
        self._is_dummy = self._microbatches_left == 0
        if not self._is_dummy:
            self._microbatches_left -= 1
            super()._begin_microbatch()


def require_agreement(sums: StepSums, row: Sequence[float], mesh: ParallelDims) -> StepSums:
    """Return the sums with every rank's row; finite only if every rank's gradients are."""
    if mesh.device_mesh is None:
        return sums
    rows = mesh.gather_rows([*row, float(sums.finite)])
    finite = all(of_rank[-1] for of_rank in rows)
    return replace(sums, rows=[of_rank[:-1] for of_rank in rows], finite=finite)


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's shards of the gradients."""
    return [local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]


def compile_model(module: nn.Module) -> nn.Module:
    """Return the module, each of whose blocks, or which itself if it has none, is compiled on its first call.

    One graph serves all sizes. By default torch compiles the first size that it sees for that size alone, and all later
    ones with symbolic sizes, so that results depend on the micro-batches that a rank happened to get first.
    """
    blocks = model_blocks(module)
    for block in blocks:
        # Without its hooks, which gather the parameters under fsdp; bound, so that a deep copy uses its own parameters.
        block.__dict__["forward"] = MethodType(torch.compile(type(block).forward, dynamic=True), block)
    wrapped = module if blocks else torch.compile(module, dynamic=True)
    assert isinstance(wrapped, nn.Module)
    return wrapped


# --- One process computes all micro-batches ---


class Single(ReducerStrategy):
    """The strategy of a world of one.

    Raises:
        ConfigError: there are several processes.
    """

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        processes = mesh.world.world_size
        if processes != 1:
            raise ConfigError(f"--strategy single needs one process, but there are {processes}. Use ddp.")
        super().__init__(module, mesh, options)


# --- Distributed data parallel: every rank holds the model and computes a part of the micro-batches ---


class DDP(ReducerStrategy):
    """Data parallelism with Paceline's reducer (``--reduction exact`` or ``allreduce``)."""
