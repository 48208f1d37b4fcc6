"""Measures one step of a model, or of half of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import psutil
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from paceline.core.errors import ConfigError, DataError, TaskError, UserError
from paceline.core.task import Loss, Task
from paceline.data.stream import as_stream
from paceline.parallel.fsdp import CAST_MODULES
from paceline.parallel.tp_autoplan import infer_tp_plan
from paceline.parallel.wrap_units import CheckpointedForward, checkpoint_activations, exclude_tied, wrap_units
from paceline.torch_internals import FakeTensorMode, tree_leaves, tree_map_only
from paceline.training.evaluation import split_values
from paceline.training.state import build_task_model, build_task_optimizers
from paceline_planning.model_partition import (
    MemoryTrace,
    MemoryTracker,
    ModelPart,
    ModelPartition,
    Precision,
    Recompute,
    Segment,
    Variant,
    activations,
    find_segments,
    nbytes,
    watch_segments,
)

# --- One rank's part of a tensor-parallel model: layers cut in two, as a plan of torch's styles says ---


_HALF = 2
_DEGREES = (2, 4, 8)
"""Ranks that layers are split over: beyond one machine's, their all-reduces are the step."""


@dataclass
class HalvedModel:
    """How a model's layers are split over two ranks.

    Attributes:
        styles: module's name -> its style; only those that split a layer.
        degrees: the numbers of ranks that can share all of them equally.
        reduced_bytes: of tensors that the ranks add up, in forward and in backward.
    """

    styles: Mapping[str, ParallelStyle]
    degrees: tuple[int, ...]
    reduced_bytes: int = field(default=0, init=False)

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[None]:
        """While it is entered, ``module`` is one rank's; its parameters stay cut."""
        cut: dict[int, nn.Parameter] = {}
        with ExitStack() as hooks:
            for name, style in self.styles.items():
                layer = module.get_submodule(name)
                columns = isinstance(style, ColwiseParallel)
                for own, dimension in _dimensions(layer, columns).items():
                    parameter = getattr(layer, own)
                    if parameter is None:
                        continue
                    if id(parameter) not in cut:
                        half = parameter.detach().chunk(_HALF, dimension)[0].clone()
                        cut[id(parameter)] = nn.Parameter(half, requires_grad=parameter.requires_grad)
                    setattr(layer, own, cut[id(parameter)])
                if not columns and isinstance(layer, nn.Linear) and _is_whole(style, "input_layouts"):
                    hooks.callback(layer.register_forward_pre_hook(_own_input).remove)
                hooks.callback(layer.register_forward_hook(self._communicates(style, columns)).remove)
            yield

    def _communicates(self, style: ParallelStyle, columns: bool) -> Any:
        gathers = columns and _is_whole(style, "output_layouts")

        def hook(_layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> Any:
            if not columns:
                self.reduced_bytes += nbytes([output])
                return None
            if inputs[0].requires_grad:
                self.reduced_bytes += nbytes([inputs[0]])
            if not gathers:
                return None
            self.reduced_bytes += nbytes([output])
            return torch.cat([output] * _HALF, dim=-1)

        return hook


def splitting(task: Task, module: nn.Module) -> HalvedModel | None:
    """Split the task's model over two ranks as ``--strategy tp`` does; None if it cannot."""
    # A module that can be split over more ranks can be split over two.
    for degree in reversed(_DEGREES):
        plan = _plan(task, module, degree)
        styles = {
            name: style
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Linear | nn.Embedding)
            for pattern, style in plan.items()
            if fnmatchcase(name, pattern) and isinstance(style, ColwiseParallel | RowwiseParallel)
        }
        if styles and _is_shared_equally(module, styles, degree):
            return HalvedModel(styles, tuple(d for d in _DEGREES if d <= degree))
    return None


def _is_shared_equally(module: nn.Module, styles: Mapping[str, ParallelStyle], degree: int) -> bool:
    return all(
        getattr(layer, own).shape[dimension] % degree == 0
        for name, style in styles.items()
        for layer in (module.get_submodule(name),)
        for own, dimension in _dimensions(layer, isinstance(style, ColwiseParallel)).items()
        if getattr(layer, own) is not None
    )


def _plan(task: Task, module: nn.Module, degree: int) -> Mapping[str, ParallelStyle]:
    given = task.tensor_parallel_plan(module)
    if given is not None:
        return given
    try:
        return infer_tp_plan(module, degree)
    except ConfigError:  # nothing to split, or not into so many parts
        return {}


def _own_input(_layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (inputs[0].chunk(_HALF, dim=-1)[0], *inputs[1:])


def _is_whole(style: ParallelStyle, which: str) -> bool:
    return any(isinstance(layout, Replicate) for layout in getattr(style, which, ()))


def _dimensions(layer: nn.Module, columns: bool) -> dict[str, int]:
    """Return the dimension along which each of the layer's own parameters is cut."""
    if isinstance(layer, nn.Embedding):
        return {"weight": 1 if columns else 0}
    return {"weight": 0, "bias": 0} if columns else {"weight": 1}


# --- What a task's model, optimizer and step take, found out on fake tensors: no memory, no arithmetic ---


Device = Literal["cpu", "cuda"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
RECOMPUTED: tuple[Recompute, ...] = ("none", "selective", "block")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A task's model and one micro-batch; sizes in bytes.

    Attributes:
        parameters: how many numbers.
        modules: parameter bytes below each of the model's children.
        halved: of one of two ranks that share its tensors, as ``degrees`` of ranks may; None if no split is known.
        unsplit: why a model with a known split has none here.
        built_for_real: why fake tensors did not do.
    """

    microbatch: int
    parameters: int
    batch_bytes: int
    modules: Mapping[str, int]
    frozen: bool
    anatomy: ModelPartition
    halved: ModelPartition | None = None
    degrees: tuple[int, ...] = ()
    unsplit: str | None = None
    built_for_real: str | None = None

    @property
    def whole(self) -> ModelPart:
        return self.anatomy.whole

    def as_json(self) -> dict[str, Any]:
        return {
            "microbatch": self.microbatch,
            "parameters": self.parameters,
            "batch_bytes": self.batch_bytes,
            "modules": dict(self.modules),
            "frozen": self.frozen,
            "tensor_parallel_degrees": list(self.degrees),
            "stages_at_most": self.anatomy.most_stages,
            "built_for_real": self.built_for_real,
            **dataclasses.asdict(self.whole),
            "activations": [
                {"precision": precision, "checkpoint_activations": recompute, **dataclasses.asdict(held)}
                for (precision, recompute), held in self.whole.activations.items()
            ],
        }


def measure(task: Task, microbatch: int, device: Device = "cuda") -> Measurement:
    """Build the task's model and run a step of it, on fake tensors where that works.

    Args:
        device: where it will be trained: optimizers step several parameters at once on a GPU.

    Raises:
        UserError: the task cannot be built; or it needs real tensors, and is too large for this machine.
    """
    batch, fake = _batch(task, microbatch), FakeTensorMode()
    try:
        with fake:
            on_fake = tree_map_only(torch.Tensor, fake.from_tensor, batch)
            return _measure(_TracedStep(task, build_task_model(task), on_fake, microbatch), device)
    except UserError:
        raise
    except Exception as error:  # whatever the task's code does that fake tensors cannot
        reason = _first_line(error)
    _require_room(task, fake, reason)
    measured = _measure(_TracedStep(task, build_task_model(task), batch, microbatch), device)
    return dataclasses.replace(measured, built_for_real=reason)


def state_bytes(task: Task) -> int:
    """Return the bytes of a task's parameters, gradients and optimizer state, found out on fake tensors."""
    with FakeTensorMode():
        module = build_task_model(task)
        optimizers = build_task_optimizers(task, module).values()
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
        state = [leaf for optimizer in optimizers for leaf in _tensors(optimizer.state)]
        return nbytes(module.parameters()) + nbytes(trained) + nbytes(state)


class _TracedStep(NamedTuple):
    """A micro-batch that a task's model computes: real or fake tensors."""

    task: Task
    module: nn.Module
    batch: Any
    microbatch: int


def _measure(step: _TracedStep, device: Device) -> Measurement:
    module, parameters = step.module, list(step.module.parameters())
    anatomy = _dissect(step, device)
    measured = Measurement(
        microbatch=step.microbatch,
        parameters=sum(parameter.numel() for parameter in parameters),
        batch_bytes=nbytes(_tensors(step.batch)),
        modules={name: nbytes(child.parameters()) for name, child in module.named_children()},
        frozen=not all(parameter.requires_grad for parameter in parameters),
        anatomy=anatomy,
    )
    found = splitting(step.task, module)
    if found is None:
        return measured
    # Of the whole: fsdp counts what layers have on all ranks.
    inner = exclude_tied(module, wrap_units(module, "auto"))
    try:
        with found.applied(module):
            halved = _halved(step, anatomy, found, inner)
    except Exception as error:  # its code counts on the whole width; then it cannot be split
        return dataclasses.replace(measured, unsplit=_first_line(error))
    return dataclasses.replace(measured, halved=halved, degrees=found.degrees)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def _dissect(step: _TracedStep, device: Device) -> ModelPartition:
    """Run a step of the model as it is."""
    module = step.module
    traces, called = _trace(step, PRECISIONS)
    optimizers = list(build_task_optimizers(step.task, module).values())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if device == "cuda" and group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = True  # torch's default there
    parameters = list(module.parameters())
    live = MemoryTracker([*parameters, *(p.grad for p in parameters if p.grad is not None)])
    with live:
        for optimizer in optimizers:
            optimizer.step()
    state = [leaf for optimizer in optimizers for leaf in _tensors(optimizer.state)]
    whole = _part(
        module,
        exclude_tied(module, wrap_units(module, "auto")),
        traces,
        called,
        optimizer_bytes=nbytes(state),
        optimizer_temporary=max(0, live.peak - live.now),
    )
    return ModelPartition(whole=whole, pieces=_pieces(module, called), traces=traces, steps_at_once=device == "cuda")


def _halved(step: _TracedStep, before: ModelPartition, split: HalvedModel, inner: list[nn.Module]) -> ModelPartition:
    """Measure one rank's part of the model whose layers are split over two.

    It is run in fp32 only: a large model's step takes seconds even without data. The optimizer's state goes
    with the gradients, and so do half-precision copies with the weights.
    """
    traces, called = _trace(step, ("fp32",), split=split)
    was = before.whole
    others = {"reduced_bytes": split.reduced_bytes, "optimizer_bytes": 0, "optimizer_temporary": 0}
    whole = _part(step.module, inner, traces, called, **others)
    share = whole.gradient_bytes / was.gradient_bytes
    whole = dataclasses.replace(
        whole,
        optimizer_bytes=round(was.optimizer_bytes * share),
        optimizer_temporary=round(was.optimizer_temporary * share),
    )
    return ModelPartition(
        whole=whole,
        pieces=_pieces(step.module, called),
        traces=traces,
        cut_by=before.costs,
        steps_at_once=before.steps_at_once,
    )


def _part(
    module: nn.Module,
    inner: list[nn.Module],
    traces: Mapping[Variant, MemoryTrace],
    called: Sequence[tuple[str, nn.Module]],
    **others: int,
) -> ModelPart:
    """Return a model as it was run, with what else is known of it."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    root, block_bytes = _gathered(module, inner, lowered=False)
    lowered_root, lowered_blocks = _gathered(module, inner, lowered=True)
    units = {id(unit) for unit in inner}
    piece_of: dict[int, int] = {}
    for number, (_, piece) in enumerate(called):
        parts = {id(part) for part in piece.modules()}
        for unit in inner:
            if id(unit) in parts or any(part is piece for part in unit.modules()):
                piece_of.setdefault(id(unit), number)
    return ModelPart(
        parameter_bytes=nbytes(module.parameters()),
        gradient_bytes=nbytes(trained),
        buffer_bytes=nbytes(module.buffers()),
        flops=sum(traces["fp32", "none"].flops),
        root_bytes=root,
        block_bytes=block_bytes,
        block_pieces=tuple(piece_of[id(unit)] for unit in module.modules() if id(unit) in units),
        lowered_root_bytes=lowered_root,
        lowered_block_bytes=lowered_blocks,
        activations={variant: activations(trace, 0, len(trace.flops)) for variant, trace in traces.items()},
        **others,
    )


def _trace(
    step: _TracedStep, precisions: Sequence[Precision], split: HalvedModel | None = None
) -> tuple[dict[Variant, MemoryTrace], list[tuple[str, nn.Module]]]:
    """Trace a step for each precision, and for all that backward may recompute; return also the pieces."""
    traces: dict[Variant, MemoryTrace] = {}
    called: list[tuple[str, nn.Module]] = []
    reduced = 0
    for recompute in RECOMPUTED:
        try:
            with _recomputing(step.module, recompute, to_the_end=split is not None):
                for precision in precisions:
                    if split is not None:
                        split.reduced_bytes = 0
                    trace, without_copies, called = _run(step, precision)
                    traces[precision, recompute] = trace
                    if precision == "bf16":
                        traces["bf16 gathers", recompute] = without_copies
        except ConfigError:  # no block to recompute
            continue
        if split is not None and recompute == "none":
            reduced = split.reduced_bytes
    if split is not None:
        split.reduced_bytes = reduced
    return traces, called


@contextmanager
def _recomputing(module: nn.Module, what: Recompute, *, to_the_end: bool) -> Iterator[None]:
    """While it is entered, backward recomputes as training with ``--checkpoint-activations`` does.

    Raises:
        ConfigError: the model has no blocks.
    """
    if what != "none":
        checkpoint_activations(module, what, "auto", to_the_end=to_the_end)
    try:
        yield
    finally:
        for part in module.modules():
            if isinstance(getattr(vars(part).get("forward"), "__func__", None), CheckpointedForward):
                del part.__dict__["forward"]


def _run(step: _TracedStep, precision: Precision) -> tuple[MemoryTrace, MemoryTrace, list[tuple[str, nn.Module]]]:
    """Trace one forward and backward; return it also without cast weights, and the pieces as they were called first."""
    task, module, batch, microbatch = step
    gradients = []
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    candidates = find_segments(module)
    known = [*module.parameters(), *module.buffers(), *gradients, *_tensors(batch)]
    live = MemoryTracker(known, weights=module.parameters())
    segments = [child for _, child in candidates]
    with live, watch_segments(segments, live) as output_bytes, ExitStack() as hooks:
        for parameter in module.parameters():
            if parameter.requires_grad:
                hooks.callback(parameter.register_hook(live.mark_gradient).remove)  # type: ignore[no-untyped-call]
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss, _ = split_values(task.loss(module, batch))
        total = loss.sum if isinstance(loss, Loss) else loss * microbatch
        forward_events = len(live.events)
        total.backward()  # type: ignore[no-untyped-call]
        del loss, total
    # What forward never called comes last, with nothing to do.
    order = [*output_bytes, *(i for i in range(len(candidates)) if i not in output_bytes)]
    number_of = {index: number for number, index in enumerate(order)}
    # What is made before the first piece is called is the first one's.
    first = order[0]
    events = tuple((number_of.get(owner, 0) if owner >= 0 else number_of[first], delta) for owner, delta in live.events)
    copies, new = live.with_ends(live.copies), live.with_ends(live.gradients)
    trace = MemoryTrace(
        events=events,
        forward_events=forward_events,
        flops=tuple(live.flops.get(index, 0) for index in order),
        output_bytes=tuple(output_bytes.get(index, 0) for index in order),
        gradient_events=frozenset(new),
    )
    kept = [number for number in range(len(events)) if number not in copies]
    without_copies = dataclasses.replace(
        trace,
        events=tuple(events[number] for number in kept),
        forward_events=sum(number < forward_events for number in kept),
        gradient_events=frozenset(place for place, number in enumerate(kept) if number in new),
    )
    return trace, without_copies, [candidates[index] for index in order]


def _pieces(module: nn.Module, called: Sequence[tuple[str, nn.Module]]) -> tuple[Segment, ...]:
    taken: dict[int, int] = {}
    outside = {id(p): p for p in module.parameters()}
    pieces = []
    for number, (name, child) in enumerate(called):
        own = [p for p in child.parameters() if id(p) not in taken]
        shared = [taken[id(p)] for p in child.parameters() if id(p) in taken]
        for parameter in own:
            taken[id(parameter)] = number
            outside.pop(id(parameter), None)
        if number == len(called) - 1:
            own += outside.values()  # what no piece holds
        trained = [p for p in own if p.requires_grad]
        pieces.append(
            Segment(
                name=name,
                parameter_bytes=nbytes(own),
                gradient_bytes=nbytes(trained),
                buffer_bytes=nbytes(child.buffers()),
                shares=min(shared, default=None),
            )
        )
    return tuple(pieces)


def _batch(task: Task, microbatch: int) -> Any:
    """Return the first samples of the training data; a smaller dataset repeats some of them.

    A task whose samples are known without its data has a method ``build_planned_dataset``.
    """
    planned = getattr(task, "build_planned_dataset", None)
    data = task.build_dataset("train") if planned is None else planned()
    if data is None:
        raise DataError(f'{type(task).__name__}.build_dataset("train") returned None; there is nothing to plan.')
    stream = as_stream(data)
    if stream is None:
        return task.collate([data[index % len(data)] for index in range(microbatch)])
    reader = stream.open(0, 1, 0, 0)
    samples = []
    for _ in range(microbatch):
        try:
            samples.append(next(reader))
        except StopIteration:
            break
    if not samples:
        raise DataError("the training stream has no sample.")
    return task.collate([samples[index % len(samples)] for index in range(microbatch)])


def _require_room(task: Task, fake: FakeTensorMode, reason: str) -> None:
    """Refuse to build a model for real that this machine has no memory for."""
    try:
        with fake:
            needed = 4 * nbytes(task.build_model().parameters())
    except Exception:  # then its size is unknown before it is built
        return
    there = psutil.virtual_memory().available // 2
    if needed > there:
        raise TaskError(
            f"{type(task).__name__} cannot run on fake tensors ({reason}), and it is too large to be run for "
            f"real here: parameters, gradients and optimizer take about {needed / 2**30:.1f} GiB. "
            "Plan a smaller one with --set, or take what reads a tensor's values out of loss and build_model."
        )


def _gathered(module: nn.Module, inner: list[nn.Module], *, lowered: bool) -> tuple[int, tuple[int, ...]]:
    """Return the bytes that fsdp gathers with the root, and with each block, in the model's order.

    Args:
        lowered: layers that autocast casts are gathered in half precision.
    """
    casts = [layer for layer in module.modules() if lowered and isinstance(layer, CAST_MODULES)]
    half = {id(parameter) for layer in casts for parameter in layer.parameters()}
    taken: set[int] = set()
    sizes: dict[int, int] = {}

    def size(parameters: Iterable[nn.Parameter]) -> int:
        return sum(nbytes([p]) // (2 if id(p) in half else 1) for p in parameters)

    for block in inner:  # inner ones first
        own = {id(p): p for p in block.parameters() if id(p) not in taken}
        taken |= own.keys()
        sizes[id(block)] = size(own.values())
    root = size(p for p in module.parameters() if id(p) not in taken)
    return root, tuple(sizes[id(child)] for child in module.modules() if id(child) in sizes)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
        return
    yield from (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
