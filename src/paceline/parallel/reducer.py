"""The gradient reducer: gradients, losses and counts are added in the order of one tree."""

from __future__ import annotations

import cmath
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.core.errors import DataError, TaskError
from paceline.parallel.grad_buffers import FlatLayout, MicrobatchBuffers, MicrobatchSums, ScratchGradient, StepHeader
from paceline.parallel.reduction_tree import Accumulate, ReductionPlan
from paceline.parallel.sharded_state import distributed_part, local_shard
from paceline.parallel.transports import (
    Bucket,
    GradBuffer,
    GroupTransport,
    LocalTransport,
    SharedMemoryTransport,
    Transport,
    add_grad_buffer,
    supported,
)
from paceline.parallel.world import World
from paceline.torch_internals import count_writes, parameter_table

_log = logging.getLogger(__name__)
_STEP_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class StepSums:
    """The sums of a step's micro-batches, equal on every rank.

    Attributes:
        weight: sum of the losses' weights, the divisor of gradients and loss.
        loss: sum of losses over ``weight``.
        checksum: sum of the micro-batches' checksums of the sample numbers they fetched.
        rows: each rank's row, by rank.
        bad_microbatch: the lowest micro-batch whose loss was NaN or infinite, if any.
        finite: whether loss, weight and gradients are all finite.
    """

    samples: int
    weight: float
    loss: float
    checksum: int
    rows: list[Sequence[float]]
    bad_microbatch: int | None
    finite: bool


# --- Where autograd adds ---


class GradientAccumulator:
    """Gradients in flat buffers: each ``parameter.grad`` is a view into the buffer to which they point.

    Autograd's addition raises the count of writes of the view, so it is known which parameters a micro-batch has used.

    Args:
        trained: the parameters that are trained.
        has_gradients: False if another library sums them.
        layout: their places in the buffers.
        buffers: the transport's.

    Attributes:
        parameters: those whose gradients lie here.
        used: the parameters that this rank's micro-batches of the step have used, as a set of bits.
        target: the buffer to which the gradients point; -1 if they may point anywhere.
        scratch: a buffer for one micro-batch's gradient alone.
    """

    def __init__(
        self,
        trained: Sequence[nn.Parameter],
        layout: FlatLayout,
        buffers: Sequence[GradBuffer],
        *,
        has_gradients: bool,
    ) -> None:
        self.parameters = list(trained) if has_gradients else []
        self.used = 0
        self.target = -1
        self.scratch = ScratchGradient(layout, buffers[0])
        self._trained = trained
        self._bit_of = {id(parameter): 1 << index for index, parameter in enumerate(trained)}
        self._views = [self._as_parameters(layout.gradient_views(buffer)) for buffer in buffers]
        self._num_buffers = len(buffers)
        self._sums = [buffers[0][dtype][:numel] for dtype, numel in layout.gradients.items()]
        self._writes: list[int] = []  # to each gradient, before the next or current micro-batch

    def begin(self) -> None:
        """Begin a step: unused parameters have no gradient, and the user's code may have set some to None."""
        self.used = 0
        self.target = -1

    def point_at(self, buffer: int) -> None:
        """Let autograd add to a buffer."""
        for parameter, gradient in zip(self.parameters, self._views[buffer], strict=True):
            parameter.grad = gradient
        self.target = buffer
        self._writes = count_writes(self._views[buffer])

    def point_at_scratch(self) -> None:
        """Let autograd add to the scratch buffer, from zero."""
        if len(self._views) == self._num_buffers:
            self._views.append(self._as_parameters(self.scratch.views()))
        self.scratch.zero()
        self.point_at(self._num_buffers)

    def require_intact(self) -> None:
        """Reject a loss that has removed the gradients which earlier micro-batches left.

        Raises:
            TaskError: it has.
        """
        # Checking one parameter is enough: zero_grad() of a model or an optimizer removes all of its gradients.
        if self.parameters and self.parameters[-1].grad is not self._views[self.target][-1]:
            raise TaskError(
                "the loss removed the gradients of the step's earlier micro-batches. Do not call zero_grad() there: "
                "Paceline does it between steps."
            )

    def collect(self, index: int, buffer: int) -> None:
        """Copy a parameter's gradient back into a buffer, if autograd has replaced it.

        Raises:
            TaskError: a gradient came in two parts.
        """
        parameter, gradient = self.parameters[index], self._views[buffer][index]
        if parameter.grad is not gradient:
            _collect_replaced_gradient(parameter, gradient)

    def collect_all(self) -> None:
        """Copy what autograd has replaced back into the buffer to which the gradients point."""
        for parameter, gradient in zip(self.parameters, self._views[self.target], strict=True):
            if parameter.grad is not gradient:
                _collect_replaced_gradient(parameter, gradient)

    def count_uses(self) -> None:
        """Note the parameters that the micro-batch has used: autograd wrote to their gradients, once.

        Raises:
            TaskError: a gradient came in two parts.
        """
        earlier = self._writes
        self._writes = count_writes(self._views[self.target])
        if self._writes == [before + 1 for before in earlier]:  # most often it has used all
            self.used |= (1 << len(earlier)) - 1
            return
        for index, (after, before) in enumerate(zip(self._writes, earlier, strict=True)):
            if after > before + 1:
                raise _gradient_in_parts()
            if after > before:
                self.used |= 1 << index

    def mark_used(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that a micro-batch has used these parameters."""
        for parameter in parameters:
            self.used |= self._bit_of[id(parameter)]

    def finish(self, used: int) -> None:
        """Let the gradients be the sums, and None where no micro-batch of any rank has used the parameter."""
        if self.target != 0:
            self.point_at(0)
        if used != (1 << len(self._trained)) - 1:
            for index, parameter in enumerate(self._trained):
                if not used >> index & 1:
                    parameter.grad = None

    def divide(self, weight: float) -> bool:
        """Divide the summed gradients; return whether they are finite."""
        if not (math.isfinite(weight) and weight > 0):
            return False
        for gradients in self._sums:
            gradients.div_(weight)
        return are_finite(self._sums)

    def close(self) -> None:
        """Free the gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        self._views.clear()
        self._sums.clear()
        self.scratch.close()

    def _as_parameters(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return [distributed_part(part, p) for part, p in zip(parts, self.parameters, strict=True)]


# --- When a bucket is sent ---


class BucketQueue:
    """Sends buckets of gradients in their order, each once the last micro-batch's backward has filled it.

    Attributes:
        is_filling: whether the last micro-batch's backward is filling them.
    """

    def __init__(self, transport: Transport, layout: FlatLayout) -> None:
        self._transport = transport
        self._buckets = layout.buckets
        self._bucket_of = layout.bucket_of
        self._sizes = [layout.bucket_of.count(bucket) for bucket in range(len(layout.buckets))]
        self._num_with_gradients = 1 + max(layout.bucket_of, default=-1)
        self._absent: list[int] = []  # subtrees of this rank without a micro-batch in this step
        self._missing: list[int] = []  # gradients of each bucket; empty before the last micro-batch
        self._merges: Sequence[tuple[int, int]] = ()  # after the last micro-batch, bucket by bucket
        self._next = 0

    @property
    def is_filling(self) -> bool:
        return bool(self._missing)

    def begin(self, absent: list[int]) -> None:
        """Begin a step in which some subtrees of this rank have no micro-batch."""
        self._absent = absent
        self._missing = []
        self._merges = ()
        self._next = 0

    def merge_with(self, merges: Sequence[tuple[int, int]]) -> None:
        """Add buffers to each other as a bucket is sent."""
        self._merges = merges

    def begin_filling(self) -> None:
        """Begin to count the gradients of the last micro-batch."""
        if self._transport.overlaps:
            self._missing = self._sizes.copy()

    def end_filling(self) -> None:
        """End the last micro-batch."""
        self._missing = []

    def filled(self, parameter: int) -> None:
        """Count the last micro-batch's gradient of a parameter, and send the buckets that are complete."""
        self._missing[self._bucket_of[parameter]] -= 1
        while self._next < self._num_with_gradients and self._missing[self._next] == 0:
            self._send_next()

    def send_remaining(self) -> None:
        """Send the buckets that are left."""
        while self._transport.overlaps and self._next < len(self._buckets):
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        part = slice(bucket.start, bucket.stop)
        buffers = self._transport.grad_buffers
        for into, other in self._merges:
            buffers[into][bucket.dtype][part].add_(buffers[other][bucket.dtype][part])
        for index in self._absent:
            buffers[index][bucket.dtype][part].zero_()
        self._transport.launch(self._next)
        self._next += 1


# --- The sums of a step ---


class GradientReducer:
    """Sums the contributions of the micro-batches of a step, in the plan's order.

    Gradients accumulate in flat buffers (:class:`GradientAccumulator`). If the transport can overlap, hooks send a
    bucket as soon as the last micro-batch's backward has filled it (:class:`BucketQueue`). A parameter that no
    micro-batch of any rank used has no gradient after the step (``grad`` is None), as in plain PyTorch. Module buffers
    are summed as in :class:`~paceline.parallel.grad_buffers.MicrobatchBuffers`.

    Attributes:
        watched: the fingerprint of the micro-batch given to :meth:`watch`; 0 if this rank has not computed it.
        buffers: for strategies that run several micro-batches' forwards before the first backward.

    Args:
        plan: the work split and the tree.
        world: the ranks; the construction is a collective.
        row_length: number of values in a rank's row.
        timeout_s: how long a rank may keep the others waiting.
        with_gradients: False if another library sums the gradients; tell what it has used by :meth:`mark_used`.
        holds: selects the parameters and buffers; by default those on this rank.
        transport: builds the transport; by default the fastest for these ranks. If it leaves the total on some ranks
            only, only these can tell whether it is finite.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: ReductionPlan,
        world: World,
        *,
        row_length: int,
        timeout_s: float = _STEP_TIMEOUT_S,
        with_gradients: bool = True,
        holds: Callable[[torch.Tensor], bool] = lambda tensor: not tensor.is_meta,
        transport: Callable[[FlatLayout], Transport] | None = None,
    ) -> None:
        self.plan = plan
        self.watched = 0
        self._rank = world.rank
        self._activity = world.progress_tracker
        present_parameters = [(n, p) for n, p in module.named_parameters() if holds(p)]
        trained = [parameter for _, parameter in present_parameters if parameter.requires_grad]
        self._frozen = [(n, p) for n, p in present_parameters if not p.requires_grad]
        self.buffers = MicrobatchBuffers(module, holds)
        # Each rank sums its shard of a distributed parameter.
        parts = [local_shard(parameter) for parameter in trained] if with_gradients else []
        layout = FlatLayout(parts, self.buffers.floats, self.buffers.integers, self.buffers.counts)
        self._header = StepHeader(plan, world.rank, row_length, len(trained))
        self._transport = (
            make_transport(world, plan, layout.flat_buffers, layout.buckets, self._header.length, timeout_s)
            if transport is None
            else transport(layout)
        )
        grad_buffers = self._transport.grad_buffers
        self._gradients = GradientAccumulator(trained, layout, grad_buffers, has_gradients=with_gradients)
        self._queue = BucketQueue(self._transport, layout)
        self._buffer_sums = [layout.buffer_sums(buffer) for buffer in grad_buffers]
        self._with_gradients = with_gradients
        self._hooks = self._register_hooks(module)
        self._remaining: deque[tuple[int, Accumulate]] = deque()  # micro-batches of this step, the next one first
        self._sums: list[MicrobatchSums] = []
        self._watch: int | None = None
        self._check: Callable[[list[Sequence[float]]], None] | None = None

    def _register_hooks(self, module: nn.Module) -> list[RemovableHandle]:
        parameters = self._gradients.parameters
        hooks = [
            parameter.register_post_accumulate_grad_hook(self._make_hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
            if self._transport.overlaps
        ]
        return hooks + [
            parameter.register_hook(_coalesce)  # type: ignore[no-untyped-call]
            for parameter in _embeddings(module, parameters)
        ]

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if self._queue.is_filling:  # the rank's last micro-batch of the step
                self._gradients.collect(index, self._remaining[0][1].buffer)
                self._queue.filled(index)

        return hook

    def begin(self, present: Sequence[int]) -> None:
        """Begin a step in which this rank computes the micro-batches ``present``, in that order."""
        self._remaining = deque(zip(present, self.plan.accumulation(self._rank, present), strict=True))
        absent: list[int] = []
        if len(present) < self.plan.work_split[self._rank]:
            subtrees = self.plan.subtrees[self._rank]
            absent = [
                i for i, subtree in enumerate(subtrees) if not any(subtree.start <= k < subtree.stop for k in present)
            ]
        self._sums = []
        self._gradients.begin()
        self._queue.begin(absent)
        self._watch = None
        self._check = None
        self.watched = 0
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise TaskError(
                    f"parameter {name!r} requires a gradient now, but did not at the start of training. "
                    "Build the model with it trainable, and give it a learning rate of 0 until then."
                )
        self.buffers.begin()
        if not present:
            for grad_buffer in self._transport.grad_buffers:
                _zero(grad_buffer)
            # Not later: if a rank has several reducers, one for each stage of a pipeline, it sends the buckets of the
            # next one only after these.
            if self._with_gradients:
                self._queue.send_remaining()

    def watch(self, microbatch: int, check: Callable[[list[Sequence[float]]], None]) -> None:
        """Take the fingerprint of one micro-batch within the current step, on the rank that computes it.

        Args:
            microbatch: computed into the scratch buffer and then added, with the same bits: in an IEEE sum that began
                with +0, ``a + (0 + g)`` is ``a + g``.
            check: called with each rank's row before the sums are used; a collective.
        """
        self._watch = microbatch
        self._check = check

    def recompute(
        self, forward_backward: Callable[[], tuple[torch.Tensor, torch.Tensor | float]], checksum: int
    ) -> int:
        """Return the fingerprint of another rank's micro-batch, within a step and between micro-batches.

        The step's sums so far, and the buffers, do not change.

        Args:
            forward_backward: leaves the micro-batch's gradient in the parameters; returns the sums of its losses and of
                their weights.
            checksum: of the sample numbers.
        """
        self._gradients.point_at_scratch()
        loss_sum, weight = forward_backward()
        self._leave_no_trace()
        return self._gradients.scratch.fingerprint(loss_sum, weight, checksum)

    def rehearse(self, forward_backward: Callable[[], None]) -> None:
        """Compute a micro-batch before the first one of a step, without effect on its sums and the module's buffers.

        The gradients lie in memory that the step overwrites.

        Args:
            forward_backward: leaves the micro-batch's gradient in the parameters, and inspects it.
        """
        _zero(self._transport.grad_buffers[0])
        self._gradients.point_at(0)
        forward_backward()
        self._leave_no_trace()

    def _leave_no_trace(self) -> None:
        """End the computation of a micro-batch that does not count."""
        self._gradients.collect_all()
        self.buffers.reset()
        self._gradients.target = -1

    def begin_microbatch(self) -> None:
        """Prepare the next micro-batch's forward and backward."""
        microbatch, step = self._remaining[0]
        is_last = len(self._remaining) == 1
        if step.fresh:
            _zero(self._transport.grad_buffers[step.buffer])
        if microbatch == self._watch:
            self._gradients.point_at_scratch()
        else:
            if step.buffer != self._gradients.target:
                self._gradients.point_at(step.buffer)
            if is_last:
                self._queue.begin_filling()
        self._queue.merge_with(step.merges if is_last else ())

    def require_gradients(self) -> None:
        """Reject a loss that has removed the gradients which earlier micro-batches left; call this before backward.

        Raises:
            TaskError: it has.
        """
        self._gradients.require_intact()

    def end_microbatch(self, samples: int, weight: torch.Tensor | float, loss_sum: torch.Tensor, checksum: int) -> None:
        """Collect the micro-batch's gradients, buffers and sums.

        Raises:
            TaskError: a gradient came in two parts.
        """
        microbatch, step = self._remaining[0]
        is_last = len(self._remaining) == 1
        grad_buffers = self._transport.grad_buffers
        self._sums.append(MicrobatchSums(microbatch, samples, weight, loss_sum.detach(), checksum))
        self._gradients.collect_all()
        self._gradients.count_uses()
        if microbatch == self._watch:
            self.watched = self._gradients.scratch.fingerprint(loss_sum, weight, checksum)
            self._gradients.scratch.add_to(grad_buffers[step.buffer])
            self._gradients.target = -1
            if is_last:
                self._queue.begin_filling()
        self.buffers.add_to(self._buffer_sums[step.buffer], samples, reset=not is_last)
        if not self._queue.is_filling:
            for into, other in step.merges:
                add_grad_buffer(grad_buffers[into], grad_buffers[other])
        elif self._with_gradients:
            self._queue.send_remaining()
        self._queue.end_filling()
        self._remaining.popleft()

    def finish(self, row: Sequence[float]) -> StepSums:
        """Sum over all ranks; afterwards gradients and buffers hold the step's means.

        Raises:
            PeerLostError: a rank is gone; gradients and buffers are undefined.
        """
        assert not self._remaining, "a micro-batch has not been ended"
        # Those of the module buffers alone, where another library has run collectives until here: all ranks must make
        # the calls of both in one order.
        self._queue.send_remaining()
        header = self._header.pack(row, self._gradients.used, self._sums)
        self._activity.begin_collective("all-reduce")
        headers = self._transport.exchange(header)
        rows = self._header.rows(headers)
        if self._check is not None:
            # The check may compute and communicate itself.
            self._activity.end_collective()
            self._check(rows)
            self._activity.begin_collective("all-reduce")
        sums = self._header.subtree_sums(headers)
        present = tuple(subtree.samples > 0 for subtree in sums)
        if not any(present):
            raise DataError(
                "the training stream has no sample for this step, on any rank. "
                'Check what build_dataset("train") returns: an epoch must not be empty.'
            )
        combine = self.plan.combination(present)
        self._transport.reduce(combine)
        self._activity.end_collective()
        for into, other in combine.additions:
            sums[into] = sums[into].plus(sums[other])
        samples, weight, loss_sum, checksum = sums[combine.root]
        self._gradients.finish(self._header.used(headers))
        self.buffers.assign(self._buffer_sums[0], samples)
        return StepSums(
            samples=int(samples),
            weight=weight,
            loss=loss_sum / weight if weight else math.nan,
            checksum=int(checksum),
            rows=rows,
            bad_microbatch=self._header.bad_microbatch(headers),
            finite=self._gradients.divide(weight) and math.isfinite(loss_sum),
        )

    def mark_used(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that a micro-batch of this rank has used these parameters in the current step."""
        self._gradients.mark_used(parameters)

    def rollback(self) -> None:
        """Drop an unfinished step, and restore the buffers."""
        self.buffers.rollback()

    def close(self) -> None:
        """Free the gradients and the transport's memory."""
        for hook in self._hooks:
            hook.remove()
        self._gradients.close()
        self._buffer_sums.clear()
        self._transport.close()


def are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all numbers in some tensors are finite, with one wait for a GPU."""
    if not tensors:
        return True
    # A sum is finite only if all its terms are; float16 would overflow too early.
    sums = [tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]
    return bool(torch.stack(sums).isfinite().all()) if len(sums) > 1 else cmath.isfinite(sums[0].item())


def _collect_replaced_gradient(parameter: nn.Parameter | torch.Tensor, gradient: torch.Tensor) -> None:
    """Copy a gradient back into its buffer, because autograd adds out of place under ``create_graph``.

    Raises:
        TaskError: a second part was added to it.
    """
    if parameter.grad is not None:
        if any(count_writes([parameter.grad])):
            raise _gradient_in_parts()
        gradient.copy_(parameter.grad.detach())
    parameter.grad = gradient


def _gradient_in_parts() -> TaskError:
    # The two parts would be added at different places of the tree for other numbers of ranks.
    return TaskError(
        "a parameter received its gradient in two parts within one micro-batch. With activation checkpointing, pass "
        "use_reentrant=False; in the loss, call neither backward() nor zero_grad()."
    )


def _embeddings(module: nn.Module, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that may get sparse gradients: matrices, except those of linear layers."""
    owners = [owner for owner in module.modules() if not isinstance(owner, nn.Linear)]
    matrices = {id(p) for owner in owners for p in parameter_table(owner).values() if p is not None and p.dim() == 2}
    return [parameter for parameter in parameters if id(parameter) in matrices]


def _coalesce(gradient: torch.Tensor) -> torch.Tensor:
    # Autograd adds a sparse gradient entry by entry to the sum so far: without this, a row that occurs twice in a
    # micro-batch would depend on the micro-batches before it, and so on the number of ranks.
    return gradient.coalesce() if gradient.is_sparse else gradient


def _zero(grad_buffer: GradBuffer) -> None:
    for flat_buffer in grad_buffer.values():
        flat_buffer.zero_()


def make_transport(
    world: World,
    plan: ReductionPlan,
    numels: Mapping[torch.dtype, int],
    buckets: Sequence[Bucket],
    header_length: int,
    timeout_s: float,
) -> Transport:
    """Build the fastest transport for these ranks; a collective."""
    if world.world_size == 1:
        return LocalTransport(plan.num_grad_buffers[0], numels, world.device)
    if supported(world):
        try:
            return SharedMemoryTransport(world, plan, numels, header_length, timeout_s)
        except OSError as error:
            if world.rank == 0:
                _log.warning("no %s; gradients go through %s instead", error, world.backend)
    return GroupTransport(world, plan, numels, buckets)
