"""Pipeline parallelism with the exact reduction."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import psutil
import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.core.errors import ConfigError, TaskError
from paceline.core.task import Loss
from paceline.data.samples import MicroBatch
from paceline.parallel.grad_buffers import pack_set, union
from paceline.parallel.options import PipelineOptions, Split
from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.pipeline import schedules, stage_split
from paceline.parallel.pipeline.channel import BACKWARD, FORWARD, MessageAddress
from paceline.parallel.pipeline.nccl_channel import open_channel
from paceline.parallel.pipeline.schedules import (
    CHUNKS,
    Name,
    ScheduleAction,
    TimedAction,
    build_schedules,
    max_in_flight,
)
from paceline.parallel.pipeline.stages import (
    Blocks,
    LayerSplitting,
    Stage,
    StageCall,
    StageExecutor,
    StopForward,
    absent_arguments,
    closed,
    cut,
    find_blocks,
    find_stage_executor,
)
from paceline.parallel.reducer import GradientReducer, StepSums
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.parallel.sharded_state import explain_dtensor_mixing, local_shard, norms_of_parts
from paceline.parallel.strategy import ExampleBatchProvider, MicrobatchWork, StrategyOptions, require_agreement
from paceline.parallel.world import ParallelDims, World
from paceline.torch_internals import (
    buffer_table,
    construct_reverse_graph,
    foreach_mul_,
    grad_fn_of,
    map_tensors,
    parameter_table,
    stage_backward_input,
    stage_backward_weight,
)

# --- A split backward: first the gradients of a stage's input, later those of its weights ---


Groups = list[dict[str, Any]]
"""The state between the two halves."""


def backward_of_inputs(
    roots: list[torch.Tensor],
    gradients: list[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[nn.Parameter],
    *,
    check: bool,
) -> Groups:
    """Compute the gradients of ``inputs``.

    Args:
        roots: the roots of the backward; they are detached afterwards.
        gradients: of the roots.
        inputs: leaves.
        weights: those of the stage.
        check: check that the second half will reach every weight that a full backward would.

    Raises:
        TaskError: it would not.
    """
    reachable_weights = set()
    if check:
        reached = construct_reverse_graph([_node(root) for root in roots])
        reachable_weights = {_node(weight) for weight in weights} & reached.keys()
    _, groups = stage_backward_input(roots, gradients, list(inputs), iter(weights))
    if not reachable_weights <= {node for group in groups for node in group["params"]}:
        raise TaskError(
            "--pp-schedule zero-bubble cannot split the backward of a stage with outputs that do not "
            "depend on its inputs. Use --pp-schedule 1f1b, or --pp-split with other numbers."
        )
    return groups


def backward_of_weights(weights: Sequence[nn.Parameter], groups: Groups) -> None:
    """Add to the gradients of ``weights``, from the state of the first half."""
    stage_backward_weight(iter(weights), groups)


def _node(tensor: torch.Tensor) -> Any:
    return grad_fn_of(tensor)


# --- Full states from several stages' ranks ---


_Path = tuple[str | int, ...]


def gather_to_first(state: Any, part: World) -> Any:
    """Return the full state on the first rank of ``part``, and its own state on the others; a collective.

    Tensors that the first rank lacks (on the ``meta`` device, or missing in an optimizer's state) come from the first
    rank that has them, one at a time.

    Args:
        state: mappings, lists and tuples of tensors and other values.
        part: the ranks of a model replica.
    """
    leaves = dict(_leaves(state, ()))
    known = {_text(path) for path, leaf in leaves.items() if not _is_meta(leaf)} if part.rank == 0 else set()
    known = set(part.broadcast_object(sorted(known)))
    own_leaves = (
        {} if part.rank == 0 else {p: v for p, v in leaves.items() if not _is_meta(v) and _text(p) not in known}
    )
    offers = part.all_gather_object([_offer(path, leaf) for path, leaf in own_leaves.items()])
    received: dict[_Path, Any] = {}
    for source in range(1, part.world_size):
        for path_list, value, dtype, shape in offers[source]:
            path = tuple(path_list)
            if path in received:
                continue
            received[path] = value
            if dtype is None:
                continue
            if part.rank == 0:
                received[path] = torch.empty(shape, dtype=getattr(torch, dtype))
                _exchange(part, received[path], source=source)
            elif part.rank == source:
                _exchange(part, leaves[path].detach().cpu().contiguous(), source=None)
    return _merge(state, _tree(received)) if part.rank == 0 else state


def _exchange(part: World, tensor: torch.Tensor, *, source: int | None) -> None:
    if not tensor.numel():
        return
    with translate_peer_errors():
        if source is None:
            dist.send(tensor, group=part.group, group_dst=0)
        else:
            dist.recv(tensor, group=part.group, group_src=source)


def _offer(path: _Path, leaf: Any) -> list[Any]:
    if isinstance(leaf, torch.Tensor):
        return [list(path), None, str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]
    return [list(path), leaf, None, None]


def _leaves(state: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    if isinstance(state, Mapping):
        for name, value in state.items():
            yield from _leaves(value, (*path, name))
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from _leaves(value, (*path, number))
    else:
        yield path, state


def _merge(state: Any, taken: Any) -> Any:
    """Merge received values, a tree of the same form, into the state."""
    if isinstance(state, Mapping):
        return {name: _merge_entry(state, taken, name) for name in (state | taken)}
    return type(state)(_merge_entry(dict(enumerate(state)), taken, number) for number in range(len(state)))


def _merge_entry(state: Mapping[Any, Any], taken: Mapping[Any, Any], name: Any) -> Any:
    if name not in taken:
        return state[name]
    if name in state and isinstance(state[name], Mapping | list | tuple):
        return _merge(state[name], taken[name])
    return taken[name]


def _tree(taken: Mapping[_Path, Any]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for path, value in taken.items():
        branch = tree
        for name in path[:-1]:
            branch = branch.setdefault(name, {})
        branch[path[-1]] = value
    return tree


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_meta


def _text(path: _Path) -> str:
    return repr(path)


# --- The layout: each rank holds its own stages, and only names and shapes of the others ---


_AXES = ("pp",)
_USABLE_MEMORY = 0.9  # usable fraction of a device's memory


class PipelineLayout:
    """Splits a model into stages along a mesh's axis ``pp``.

    Args:
        schedule: determines the stages per rank, and the micro-batches in flight.
        how: the value of ``--pp-split``.
        microbatches: of a model replica in a step.
        splitting: splits the layers of each stage over the mesh's ``tp`` axis, if it has one.
    """

    is_collective = True
    saves_shards = False

    def __init__(
        self,
        mesh: ParallelDims,
        schedule: Name,
        how: Split,
        microbatches: int,
        example_batch: ExampleBatchProvider,
        splitting: LayerSplitting | None = None,
    ) -> None:
        if mesh.world.world_size == 1:
            raise ConfigError(
                "--strategy pp splits a model over processes, but there is only one. Use --strategy single."
            )
        self._mesh = mesh
        self._part = mesh.submesh(_AXES)
        self._schedule = schedule
        self._how = how
        self._microbatches = microbatches
        self._example_batch = example_batch
        self._splitting = splitting
        ranks = self._part.world_size
        if schedule != "sequential" and microbatches < ranks:
            raise ConfigError(
                f"--strategy pp: {microbatches} micro-batches for {ranks} stages leave some always "
                f"idle. Use --microbatches {ranks * mesh.data.world_size} or more, or fewer stages."
            )

    def place(self, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        module = build()
        # The task may build the model with randomness that Paceline does not seed.
        self._mesh.world.broadcast_module(module)
        parts = self._example_batch.parts(module)
        absent = absent_arguments(module, self._example_batch.loss) if parts is None else frozenset()
        blocks = find_blocks(module, parts, absent)
        if self._splitting is not None:
            blocks = closed(blocks, self._splitting.decide(module))
        ranks = self._part.world_size
        count = ranks * CHUNKS[self._schedule]
        stage_split.require_blocks(blocks, count)
        sizes = self._sizes(blocks, module, device, count)
        stages = cut(blocks, sizes)
        forward = StageExecutor(blocks, stages, open_channel(self._mesh.world, self._part, count))
        held = {name for stage in forward.own for name in stage.holds}
        if self._part.rank == 0:  # and tensors that no block uses
            held |= _names(module) - {name for stage in stages for name in stage.holds}
        _drop_unused(module, held)
        map_tensors(module, lambda tensor: tensor if tensor.is_meta else tensor.to(device))
        if self._splitting is not None:
            self._splitting.split(module)
        object.__setattr__(module, "forward", forward)
        return module

    def wrap_optimizers(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Optimizer]:
        return optimizers  # their state follows the parameters

    def make_ema_model(self, build: Callable[[], nn.Module], like: nn.Module, device: torch.device) -> nn.Module:
        raise AssertionError("a pipeline does not support a moving average")

    def full(self, state: Any, *, keep: bool) -> Any:
        # The first model replica is enough, and the first rank of each stage.
        first = self._mesh.is_first_along(_AXES)
        if self._splitting is not None:
            state = self._splitting.full(state, keep=keep or first)
        return gather_to_first(state, self._part) if first else state

    @torch.no_grad()
    def clip_gradients(self, module: nn.Module, max_norm: float) -> torch.Tensor:
        """Clip as one process would: by the norm of all gradients' norms, in the order of the parameters."""
        parameters = [p for p in module.parameters() if p.requires_grad]
        own = {number: p.grad for number, p in enumerate(parameters) if p.grad is not None}
        of_number = dict(zip(own, norms_of_parts(list(own.values())), strict=True))
        zero = torch.zeros((), device=self._part.device)
        used = find_stage_executor(module).used
        # Only parameters with a gradient on some stage: even a zero changes the order of the additions.
        with_gradient = [number for number in range(len(parameters)) if used >> number & 1]
        norms = torch.stack([of_number.get(number, zero) for number in with_gradient] or [zero])
        # Each norm is on one rank and zero on the others, so the sum is exact.
        activity = self._part.progress_tracker
        activity.begin_collective("all-reduce")
        with translate_peer_errors():
            dist.all_reduce(norms, group=self._part.group)
        activity.end_collective()
        norm: torch.Tensor = torch.linalg.vector_norm(norms)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        of_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for gradient in own.values():
            of_dtype.setdefault(gradient.dtype, []).append(local_shard(gradient))
        for parts in of_dtype.values():
            foreach_mul_(parts, factor)
        return norm

    def _sizes(self, blocks: Blocks, module: nn.Module, device: torch.device, count: int) -> tuple[int, ...]:
        # PipeDream's bits depend on the cut, so it must not depend on a measurement.
        if self._how != "balanced" or self._schedule == "pipedream":
            return stage_split.manual_split(blocks, count, self._how)
        world, sizes, problem = self._mesh.world, None, None
        degree = 1 if self._splitting is None else self._splitting.degree
        if world.rank == 0:
            costs = stage_split.measure(blocks, module, device, self._example_batch.loss)
            kept = max_in_flight(build_schedules(self._schedule, self._part.world_size, self._microbatches))
            try:
                sizes = stage_split.balanced_split(
                    costs,
                    count,
                    in_flight=[kept[stage] for stage in range(count)],
                    limit_bytes=degree * _limit_bytes(world),
                )
            except ConfigError as error:
                problem = str(error)
        sizes, problem = world.broadcast_object([sizes, problem])
        if problem is not None:
            raise ConfigError(problem)
        return tuple(sizes)


def _limit_bytes(world: World) -> float:
    processes = max(1, world.local_world_size)
    if world.device.type != "cuda":
        return _USABLE_MEMORY * psutil.virtual_memory().total / processes
    torch.cuda.empty_cache()  # of the measurement
    free, _ = torch.cuda.mem_get_info(world.device)
    processes_per_gpu = 1 if world.backend == "nccl" else -(-processes // torch.cuda.device_count())
    return _USABLE_MEMORY * (free + torch.cuda.memory_allocated(world.device)) / processes_per_gpu


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in (*module.named_parameters(), *module.named_buffers())}


def _drop_unused(module: nn.Module, held: set[str]) -> None:
    """Replace tensors that this rank does not hold by ones on the ``meta`` device, with names and shapes."""
    tensors: Mapping[str, torch.Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    own = {id(tensor) for name, tensor in tensors.items() if name in held}
    dropped: dict[int, torch.Tensor] = {}
    for owner in module.modules():
        for table in (parameter_table(owner), buffer_table(owner)):
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in own:
                    if id(tensor) not in dropped:
                        dropped[id(tensor)] = _shape_of(tensor)
                    table[name] = dropped[id(tensor)]  # type: ignore[assignment]


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    shape = tensor.detach().to("meta")
    if not isinstance(tensor, nn.Parameter):
        return shape
    parameter = nn.Parameter(shape, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)  # attributes set by the task
    return parameter


# --- The strategy: runs the micro-batches of a step through the stages, in the order of a schedule ---


_log = logging.getLogger(__name__)


class ActionClock:
    """The times of a step's actions: on a GPU those at which it computes, not those at which the CPU enqueues it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._is_running = False
        self._begin: Any = None
        self._actions: list[tuple[ScheduleAction, Any, Any]] = []

    def begin_step(self, *, recorded: bool) -> None:
        """Forget the last step; times are only taken in a step that is recorded."""
        self._is_running = recorded
        self._actions = []

    def begin(self) -> None:
        """Begin an action; called again once its input has arrived, to exclude the waiting."""
        self._begin = self._now()

    def end(self, action: ScheduleAction) -> None:
        """End the action."""
        if self._is_running:
            self._actions.append((action, self._begin, self._now()))

    def timed(self) -> list[TimedAction]:
        """Return the actions of the recorded step, by ``time.time()``; waits for the GPU."""
        if not self._on_gpu:
            return [TimedAction(action, begin, end) for action, begin, end in self._actions]
        last = self._now()
        last.synchronize()
        now = time.time()
        return [
            TimedAction(action, *(now - moment.elapsed_time(last) / 1e3 for moment in (begin, end)))
            for action, begin, end in self._actions
        ]

    def _now(self) -> Any:
        if not self._is_running:
            return None
        if not self._on_gpu:
            return time.time()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


@dataclass
class _InFlightMicrobatch:
    """A stage's state of a micro-batch between its forward and the end of its backward.

    Attributes:
        turn: inputs and outputs.
        loss: of the last stage.
        buffers: the stage's buffers after the forward.
        weight, loss_sum: of the loss, once known.
        roots, gradients: the roots of the backward.
        groups: the state of :func:`backward_of_inputs`; None if the weights need a full backward.
    """

    turn: StageCall
    loss: Loss | None
    buffers: list[torch.Tensor]
    weight: torch.Tensor | float = 0.0
    loss_sum: torch.Tensor | float = 0.0
    roots: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    groups: Groups | None = None


class Pipeline:
    """Runs a schedule; the gradients of each micro-batch are summed as usual, with the bits of one process.

    Attributes:
        module, model: the model, split into stages.
        plan: the assignment of micro-batches.
        microbatches: of this rank's model replica.

    Args:
        module: placed by :class:`PipelineLayout`.
        options: the strategy's; ``--pp-schedule`` is the order of the work.
    """

    num_dummy_steps = 0
    moves_parameters = False
    overlaps_steps = False

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        self.plan = ReductionPlan(
            sum(options.work_split), mesh.data.world_size, options.reduction_order, options.work_split
        )
        self.module = module
        self.model = module
        self.microbatches = self.plan.microbatches_of(mesh.data.rank)
        self._mesh = mesh
        schedule = options.config[PipelineOptions].pp_schedule
        # PipeDream's steps that nothing overlaps with.
        self._schedule: Name = "1f1b" if schedule == "pipedream" else schedule
        self._forward = find_stage_executor(module)
        self._link = self._forward.link
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        in_stages = {name for stage in self._forward.stages for name in stage.holds}
        self._reducers: dict[int, GradientReducer] = {}
        self._weights: dict[int, list[nn.Parameter]] = {}
        for number, stage in enumerate(self._forward.own):
            unused = {name for name, t in tensors.items() if name not in in_stages and not t.is_meta}
            names = stage.holds | (unused if number == 0 else set())
            own = {id(tensors[name]) for name in names}
            self._reducers[stage.number] = GradientReducer(
                module,
                self.plan,
                mesh.data,
                row_length=options.row_length if number == 0 else 0,
                holds=partial(_is_one_of, own),
            )
            self._weights[stage.number] = [
                tensor
                for name in sorted(stage.holds)
                if isinstance(tensor := tensors[name], nn.Parameter) and tensor.requires_grad
            ]
        self._first_reducer = next(iter(self._reducers.values()))
        self._flights: dict[tuple[int, int], _InFlightMicrobatch] = {}
        self._clock = ActionClock(mesh.world.device)
        self._steps = 0
        self._trace = options.directory / schedules.FILE

    @property
    def stats(self) -> Mapping[str, Any]:
        return {}

    def begin_step(self, present: Sequence[int]) -> None:
        # A replica without micro-batches sends here what others send in backward: the last stage's gradients first.
        for _, reducer in sorted(self._reducers.items(), reverse=True):
            reducer.begin(present)

    def run_microbatches(self, microbatches: Sequence[MicroBatch], work: MicrobatchWork) -> None:
        world = self._link.world
        actions: dict[str, Callable[[Stage, int, MicroBatch, MicrobatchWork], None]] = {
            "F": self._run_forward,
            "B": self._run_backward,
            "I": self._run_input_backward,
            "W": self._run_weight_backward,
        }
        self._clock.begin_step(recorded=self._is_recorded(self._steps + 1))
        order = build_schedules(self._schedule, world.world_size, len(microbatches))[world.rank]
        # A stage with split layers also waits for the ranks of the other parts.
        with translate_peer_errors(), explain_dtensor_mixing():
            self._link.post_recv([message for action in order for message in self._input_messages(action)])
            for action in order:
                kind, number, k = action
                self._clock.begin()
                actions[kind](self._forward.stages[number], k, microbatches[k], work)
                self._clock.end(action)
        self._link.wait()

    def run_dummy(self, loss: Callable[[nn.Module], torch.Tensor]) -> None:
        raise AssertionError("this strategy has no dummy micro-steps")

    def reduce(self, row: Sequence[float]) -> StepSums:
        self._record()
        sums = self._first_reducer.finish(row)
        rest = [reducer for reducer in self._reducers.values() if reducer is not self._first_reducer]
        finite = all([sums.finite, *(reducer.finish(()).finite for reducer in rest)])
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        own = sum(1 << number for number, parameter in enumerate(trained) if parameter.grad is not None)
        sums = require_agreement(replace(sums, finite=finite), [*row, *pack_set(own, len(trained))], self._mesh)
        self._forward.used = union(of_rank[len(row) :] for of_rank in sums.rows)
        return replace(sums, rows=[of_rank[: len(row)] for of_rank in sums.rows])

    def _is_recorded(self, step: int) -> bool:
        return step > 1 and not step & (step - 1)

    def _record(self) -> None:
        """Save the trace of the 2nd, 4th, 8th, ... step for ``paceline runs pipeline``."""
        self._steps += 1
        if not self._is_recorded(self._steps):
            return
        rows = [[*t.action, t.begin, t.end] for t in self._clock.timed()]
        ranks = self._link.world.all_gather_object(rows)
        if self._mesh.world.rank == 0:
            try:
                schedules.write(self._trace, self._schedule, self._steps, ranks)
            except OSError as error:  # training continues without the trace
                _log.warning("%s cannot be written: %s", self._trace, error.strerror)

    def rollback(self) -> None:
        self._flights.clear()
        for reducer in self._reducers.values():
            reducer.rollback()

    def close(self) -> None:
        for reducer in self._reducers.values():
            reducer.close()

    def _input_messages(self, action: ScheduleAction) -> list[tuple[int, MessageAddress]]:
        """Return the sender and address of the action's input, if it comes from another rank."""
        kind, stage, k = action
        if kind == "F" and stage > 0:
            return [(self._forward.rank_of(stage - 1), MessageAddress(stage, FORWARD, k))]
        if kind in ("B", "I") and stage < len(self._forward.stages) - 1:
            return [(self._forward.rank_of(stage + 1), MessageAddress(stage, BACKWARD, k))]
        return []

    def _run_forward(self, stage: Stage, k: int, microbatch: MicroBatch, work: MicrobatchWork) -> None:
        inputs = self._receive(stage.number - 1, MessageAddress(stage.number, FORWARD, k)) if stage.number else []
        buffers = self._reducers[stage.number].buffers
        turn = StageCall(stage, inputs)
        loss: Loss | None = None
        self._forward.turn = turn
        buffers.swap_in()
        try:
            loss = work.forward(self.model, microbatch)
        except StopForward:
            pass
        finally:
            self._forward.turn = None
            left_in_buffers = buffers.swap_out()
        if not turn.called:
            raise TaskError("the loss does not call the model, so a pipeline has nothing to run.")
        self._flights[stage.number, k] = _InFlightMicrobatch(turn, loss, left_in_buffers)
        if not self._forward.is_last(stage):
            self._send(turn.left, MessageAddress(stage.number + 1, FORWARD, k))

    def _run_backward(self, stage: Stage, k: int, microbatch: MicroBatch, work: MicrobatchWork) -> None:
        flight = self._flights[stage.number, k]
        self._begin_backward(stage, k, flight, work)
        reducer = self._reducers[stage.number]
        reducer.begin_microbatch()
        if flight.roots:
            torch.autograd.backward(flight.roots, flight.gradients)
        self._send_back(stage, k, flight)
        self._end(stage, k, flight, microbatch, work)

    def _run_input_backward(self, stage: Stage, k: int, microbatch: MicroBatch, work: MicrobatchWork) -> None:
        flight = self._flights[stage.number, k]
        self._begin_backward(stage, k, flight, work)
        inputs = [tensor for tensor in _tensors(flight.turn.entered) if _wants_gradient(tensor)]
        if inputs and flight.roots:
            weights = self._weights[stage.number]
            # One step is enough to check how the stage is built.
            flight.groups = backward_of_inputs(flight.roots, flight.gradients, inputs, weights, check=not self._steps)
        self._send_back(stage, k, flight)

    def _run_weight_backward(self, stage: Stage, k: int, microbatch: MicroBatch, work: MicrobatchWork) -> None:
        flight = self._flights[stage.number, k]
        self._reducers[stage.number].begin_microbatch()
        if flight.groups is not None:
            backward_of_weights(self._weights[stage.number], flight.groups)
        elif flight.roots:
            torch.autograd.backward(flight.roots, flight.gradients)
        self._end(stage, k, flight, microbatch, work)

    def _begin_backward(self, stage: Stage, k: int, flight: _InFlightMicrobatch, work: MicrobatchWork) -> None:
        """Determine the loss, and the roots and gradients of the backward."""
        if flight.loss is not None:
            root = work.scale_loss(flight.loss.sum)
            weight = flight.loss.weight
            flight.weight = weight.detach() if isinstance(weight, torch.Tensor) else float(weight)
            loss_sum = flight.loss.sum.detach()
            # Not a number on a GPU, for which the CPU would have to wait.
            flight.loss_sum = loss_sum if loss_sum.is_cuda else loss_sum.item()
            flight.roots = [root]
            flight.gradients = [torch.ones_like(root)]
            flight.loss = None
            return
        answer = self._receive(stage.number + 1, MessageAddress(stage.number, BACKWARD, k))
        flight.weight, flight.loss_sum, *gradients = answer
        outputs = [tensor for tensor in _tensors(flight.turn.left) if tensor.requires_grad]
        pairs = [(t, g) for t, g in zip(outputs, gradients, strict=True) if g is not None]
        flight.roots = [t for t, _ in pairs]
        flight.gradients = [g for _, g in pairs]
        flight.turn.left = []

    def _send_back(self, stage: Stage, k: int, flight: _InFlightMicrobatch) -> None:
        if stage.number == 0:
            return
        entered = [tensor for tensor in _tensors(flight.turn.entered) if _wants_gradient(tensor)]
        values = [flight.weight, flight.loss_sum, *(tensor.grad for tensor in entered)]
        self._send(values, MessageAddress(stage.number - 1, BACKWARD, k))

    def _end(
        self, stage: Stage, k: int, flight: _InFlightMicrobatch, microbatch: MicroBatch, work: MicrobatchWork
    ) -> None:
        reducer = self._reducers[stage.number]
        reducer.buffers.restore(flight.buffers)
        # The losses are the same on all stages of this rank, and each reducer would wait for a GPU to read them.
        loss_sum = flight.loss_sum if reducer is self._first_reducer else 0.0
        if not isinstance(loss_sum, torch.Tensor):
            loss_sum = torch.tensor(loss_sum, dtype=torch.float64)
        reducer.end_microbatch(microbatch.num_samples, flight.weight, loss_sum, microbatch.checksum)
        del self._flights[stage.number, k]
        work.backward_done()

    def _send(self, values: Sequence[Any], address: MessageAddress) -> None:
        self._link.send(values, self._forward.rank_of(address.stage), address)

    def _receive(self, stage: int, address: MessageAddress) -> list[Any]:
        received = self._link.receive(self._forward.rank_of(stage), address)
        self._clock.begin()  # exclude the waiting
        return received


def _is_one_of(ids: set[int], tensor: torch.Tensor) -> bool:
    return id(tensor) in ids


def _wants_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, tuple):
            tensors += _tensors(value)
    return tensors
