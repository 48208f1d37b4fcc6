"""Blocks of a model's forward, and the execution of stages."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import fx, nn

from paceline.core.errors import TaskError
from paceline.parallel.pipeline.channel import EVALUATION, MessageAddress, StageChannel, pack, unpack
from paceline.torch_internals import ASSERT_IS_NONE, tree_map_only

# --- A model as a sequence of blocks ---


Values = dict[str, Any]
"""The values that a forward has computed so far, by name."""


@dataclass(frozen=True)
class PipelineBlock:
    """A part of a model's forward.

    Attributes:
        name: for messages.
        run: reads its inputs from a mapping, and writes its outputs into it.
        needs: names of the inputs.
        gives: names of the outputs, in order.
        holds: names of its parameters and buffers, by their first name in the model.
        count: number of the model's original parts in it, each with parameters.
    """

    name: str
    run: Callable[[Values], None]
    needs: frozenset[str]
    gives: tuple[str, ...]
    holds: frozenset[str]
    count: int = 1


@dataclass(frozen=True)
class Blocks:
    """A model's forward as a sequence of blocks.

    Attributes:
        blocks: in the order of execution.
        bind: turns a call's arguments into initial values, which every rank has.
        result: computes the call's result from the values of ``result_needs``.
        result_needs: names of values.
        shared: parameters that keep blocks together, each with its blocks.
        closed: merged blocks, between whose parts ranks hold different features.
    """

    blocks: tuple[PipelineBlock, ...]
    bind: Callable[..., Values]
    result: Callable[[Values], Any]
    result_needs: frozenset[str]
    shared: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()

    def crossing(self, cut: int) -> tuple[str, ...]:
        """Return the values computed before block ``cut`` and needed by it or later, in order."""
        later = self.result_needs.union(*(block.needs for block in self.blocks[cut:]))
        names = dict.fromkeys(name for block in self.blocks[:cut] for name in block.gives)
        return tuple(name for name in names if name in later)


def find_blocks(module: nn.Module, parts: Sequence[Any] | None, absent: frozenset[str] = frozenset()) -> Blocks:
    """Return the blocks of a model, of which no two share a parameter or a buffer.

    Args:
        parts: the result of ``Task.pipeline_blocks``; None to trace ``forward``.
        absent: the arguments of ``forward`` that are None in calls, on which a trace depends.

    Raises:
        TaskError: ``forward`` cannot be traced, or ``parts`` are invalid.
    """
    blocks = _trace_blocks(module, absent) if parts is None else _blocks_from_parts(module, parts)
    return _merge_shared(blocks)


def _merge_shared(blocks: Blocks) -> Blocks:
    """Merge blocks that share a parameter or buffer, with all blocks between them."""
    blocks = replace(blocks, blocks=_merge_parameterless(blocks.blocks))
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, block in enumerate(blocks.blocks):
        for name in block.holds:
            first.setdefault(name, number)
            last[name] = number
    shared = tuple(
        f"{name} (in {blocks.blocks[first[name]].name} and {blocks.blocks[last[name]].name})"
        for name in sorted(first)
        if first[name] != last[name]
    )
    merged: list[PipelineBlock] = []
    pending: list[PipelineBlock] = []
    open_until = -1
    for number, block in enumerate(blocks.blocks):
        pending.append(block)
        open_until = max([open_until, *(last[name] for name in block.holds)])
        if open_until <= number:
            merged.append(merge_blocks(pending))
            pending = []
    return replace(blocks, blocks=tuple(merged), shared=shared)


def _merge_parameterless(blocks: Sequence[PipelineBlock]) -> tuple[PipelineBlock, ...]:
    """Merge each block without parameters into the previous one, or the next one at the beginning."""
    groups: list[list[PipelineBlock]] = []
    for block in blocks:
        if block.holds and groups and any(earlier.holds for earlier in groups[-1]):
            groups.append([block])
        elif groups:
            groups[-1].append(block)
        else:
            groups.append([block])
    return tuple(merge_blocks(group) for group in groups)


def merge_blocks(blocks: Sequence[PipelineBlock]) -> PipelineBlock:
    """Merge neighbouring blocks into one."""
    if len(blocks) == 1:
        return blocks[0]
    gives = tuple(name for block in blocks for name in block.gives)
    runs = [block.run for block in blocks]

    def run(values: Values) -> None:
        for run_part in runs:
            run_part(values)

    return PipelineBlock(
        name=f"{blocks[0].name} to {blocks[-1].name}",
        run=run,
        needs=frozenset(n for block in blocks for n in block.needs).difference(gives),
        gives=gives,
        holds=frozenset(n for block in blocks for n in block.holds),
        count=sum(block.count for block in blocks),
    )


# --- from the task


def _blocks_from_parts(module: nn.Module, parts: Sequence[Any]) -> Blocks:
    """Build a chain in which each part is called with the previous part's result, a tuple unpacked."""
    names = _names_of_tensors(module)
    blocks: list[PipelineBlock] = []
    for number, part in enumerate(parts):
        function, modules = part if isinstance(part, tuple) else (part, [part])
        if not callable(function) or not all(isinstance(m, nn.Module | torch.Tensor) for m in modules):
            raise TaskError(
                f"part {number} of pipeline_blocks is a {type(part).__name__}; it must be a module, or "
                "a pair of a function and a list of the modules and parameters that it uses."
            )
        tensors = [t for m in modules for t in ([m] if isinstance(m, torch.Tensor) else _tensors_of(m))]
        foreign = [t for t in tensors if id(t) not in names]
        if foreign:
            raise TaskError(
                f"part {number} of pipeline_blocks uses a parameter that is not one of the model's. "
                "Take the parts from the model that it is given."
            )
        blocks.append(_link(number, function, frozenset(names[id(t)] for t in tensors), names, part))
    if not blocks:
        raise TaskError("pipeline_blocks returned no parts. Return the model's, in order, or None.")
    last = str(len(blocks))

    def bind(*args: Any, **kwargs: Any) -> Values:
        return {"arguments": (args, kwargs)}

    return Blocks(tuple(blocks), bind, lambda values: values[last], frozenset({last}))


def _link(
    number: int, function: Callable[..., Any], holds: frozenset[str], names: dict[int, str], part: Any
) -> PipelineBlock:
    before, after = str(number), str(number + 1)

    def run(values: Values) -> None:
        if number == 0:
            args, kwargs = values["arguments"]
            values[after] = function(*args, **kwargs)
            return
        previous = values[before]
        values[after] = function(*previous) if isinstance(previous, tuple) else function(previous)

    named = part if isinstance(part, nn.Module) else function
    name = getattr(named, "__name__", type(named).__name__)
    return PipelineBlock(f"{number} {name}", run, frozenset({before} if number else {"arguments"}), (after,), holds)


# --- from a trace


class _Tracer(fx.Tracer):
    """Traces into containers only, and treats a block as a leaf."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, nn.Sequential):
            return False
        return not any(isinstance(child, nn.ModuleList) and len(child) > 1 for child in m.children())


def _trace_blocks(module: nn.Module, absent: frozenset[str]) -> Blocks:
    was_training = module.training
    texts = []
    try:
        for mode in (False, True):
            module.train(mode)
            graph = _Tracer().trace(module, concrete_args=dict.fromkeys(absent) or None)
            for node in reversed(graph.nodes):
                if getattr(node.target, "__name__", "") == ASSERT_IS_NONE or (
                    node.op == "placeholder" and not node.users
                ):
                    graph.erase_node(node)
            texts.append(str(graph))
    except Exception as error:  # the forward may raise anything under a trace
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _unsplittable(module, reason) from error
    finally:
        module.train(was_training)
    if texts[0] != texts[1]:
        raise _unsplittable(module, "it differs between training and evaluation")
    signature = inspect.signature(module.forward)
    return _blocks_of(module, graph, signature, absent)


def _unsplittable(module: nn.Module, reason: str) -> TaskError:
    return TaskError(
        f"the forward of {type(module).__name__} cannot be split into blocks: {reason}. Name its parts in the "
        "task: def pipeline_blocks(self, model); see docs/pipeline.md."
    )


def _blocks_of(module: nn.Module, graph: fx.Graph, signature: inspect.Signature, absent: frozenset[str]) -> Blocks:
    names = _names_of_tensors(module)
    groups: list[tuple[str, list[fx.Node], set[str]]] = []
    leading: list[fx.Node] = []
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        held = {names[id(tensor)] for tensor in _used(module, node)}
        if held:
            groups.append((str(node.target), [*leading, node], held))
            leading = []
        elif groups:
            groups[-1][1].append(node)
        else:
            leading.append(node)
    if not groups:
        raise _unsplittable(module, "no part of it has parameters")
    blocks = tuple(_block(module, name, nodes, held) for name, nodes, held in groups)

    def bind(*args: Any, **kwargs: Any) -> Values:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        now = frozenset(name for name, value in bound.arguments.items() if value is None)
        if now != absent:
            named = ", ".join(sorted(now ^ absent))
            raise TaskError(
                f"the model is called both with and without {named}, but was split for one of the two. "
                "Use one kind of call, or name its parts in the task: def pipeline_blocks(self, model)."
            )
        return {node.name: bound.arguments[str(node.target)] for node in placeholders}

    returned = output.args[0]

    def result(values: Values) -> Any:
        return fx.map_arg(returned, lambda node: values[node.name])

    return Blocks(blocks, bind, result, frozenset(node.name for node in output.all_input_nodes))


def _block(module: nn.Module, name: str, nodes: Sequence[fx.Node], held: set[str]) -> PipelineBlock:
    gives = tuple(node.name for node in nodes)
    needs = frozenset(n.name for node in nodes for n in node.all_input_nodes).difference(gives)
    steps = [(node, _step(module, node)) for node in nodes]

    def run(values: Values) -> None:
        for node, step in steps:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n.name])
            values[node.name] = step(*args, **kwargs)

    return PipelineBlock(name, run, needs, gives, frozenset(held))


def _step(module: nn.Module, node: fx.Node) -> Callable[..., Any]:
    if node.op == "call_module":
        return module.get_submodule(str(node.target))
    if node.op == "call_function":
        assert callable(node.target)
        return node.target
    name = str(node.target)
    if node.op == "call_method":
        return lambda this, *args, **kwargs: getattr(this, name)(*args, **kwargs)
    assert node.op == "get_attr"
    owner, _, attribute = name.rpartition(".")
    holder = module.get_submodule(owner)
    return lambda: getattr(holder, attribute)  # read late, because stages replace tensors that they do not hold


def _used(module: nn.Module, node: fx.Node) -> Iterator[torch.Tensor]:
    if node.op == "call_module":
        yield from _tensors_of(module.get_submodule(str(node.target)))
    elif node.op == "get_attr":
        value = _step(module, node)()
        if isinstance(value, torch.Tensor):
            yield value


def _tensors_of(module: nn.Module) -> Iterable[torch.Tensor]:
    return (*module.parameters(), *module.buffers())


def _names_of_tensors(module: nn.Module) -> dict[int, str]:
    """Return the first name of each parameter and buffer, by its ``id``."""
    names: dict[int, str] = {}
    for named in (module.named_parameters(), module.named_buffers()):
        for name, tensor in named:
            names.setdefault(id(tensor), name)
    return names


def absent_arguments(module: nn.Module, trial: Callable[[nn.Module], Any]) -> frozenset[str]:
    """Return the arguments of ``forward`` that are None when ``trial`` calls the module, without running it.

    Raises:
        TaskError: ``trial`` does not call it.
    """
    signature = inspect.signature(module.forward)
    calls: list[frozenset[str]] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        calls.append(frozenset(name for name, value in bound.arguments.items() if value is None))
        raise _Called

    with torch.random.fork_rng([]), replace_forward(module, forward):
        try:
            trial(module)
        except _Called:
            return calls[0]
    raise TaskError("the loss does not call the model, so a pipeline has nothing to run.")


class _Called(BaseException):
    """Not an ``Exception``, which the task might catch."""


@contextmanager
def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Make calls of the module call ``forward`` within the block."""
    object.__setattr__(module, "forward", forward)
    try:
        yield
    finally:
        object.__delattr__(module, "forward")


# --- The interface for splitting the layers of stages ---


class LayerSplitting(Protocol):
    """Splits the layers of a stage over the ranks that hold this stage of one model replica.

    Attributes:
        degree: number of these ranks.
    """

    @property
    def degree(self) -> int: ...

    def decide(self, module: nn.Module) -> Mapping[str, bool]:
        """Choose the plan for :meth:`split`.

        Returns:
            The parameters, in the model's order, of layers with split outputs (True) and with split inputs (False);
            between them, ranks hold different features.

        Raises:
            ConfigError: the layers cannot be divided by the number of ranks.
            TaskError: the task's plan does not fit its model.
        """

    def split(self, module: nn.Module) -> None:
        """Split the layers of this stage, whose parameters are not on the ``meta`` device."""

    def full(self, state: Any, *, keep: bool) -> Any:
        """See :meth:`paceline.parallel.strategy.ParameterLayout.full`."""


def closed(blocks: Blocks, splits: Mapping[str, bool]) -> Blocks:
    """Merge blocks between which ranks hold different features and draw different random numbers.

    Args:
        splits: the result of :meth:`LayerSplitting.decide`.
    """
    merged: list[PipelineBlock] = []
    pending: list[PipelineBlock] = []
    for block in blocks.blocks:
        pending.append(block)
        marks = [opens for name, opens in splits.items() if name in block.holds]
        is_open = marks[-1] if marks else len(pending) > 1
        if not is_open:
            merged.append(merge_blocks(pending))
            pending = []
    if pending:
        merged.append(merge_blocks(pending))
    names = {block.name for block in blocks.blocks}
    return replace(
        blocks, blocks=tuple(merged), closed=tuple(block.name for block in merged if block.name not in names)
    )


# --- The forward of a model whose stages are on several ranks ---


_AT_ONCE = 12  # values of a result per message, whose header has room for that many tensors


@dataclass(frozen=True)
class Stage:
    """A range of blocks.

    Attributes:
        number: from 0.
        blocks: in order.
        enters: the names of the values from the previous stage.
        leaves: the names of the values for the next one.
        holds: names of its parameters and buffers.
    """

    number: int
    blocks: tuple[PipelineBlock, ...]
    enters: tuple[str, ...]
    leaves: tuple[str, ...]
    holds: frozenset[str]


def cut(found: Blocks, sizes: Sequence[int]) -> list[Stage]:
    """Group the blocks into stages of these sizes."""
    stages, start = [], 0
    for number, size in enumerate(sizes):
        blocks = found.blocks[start : start + size]
        stages.append(
            Stage(
                number,
                blocks,
                enters=found.crossing(start),
                leaves=found.crossing(start + size),
                holds=frozenset(name for block in blocks for name in block.holds),
            )
        )
        start += size
    return stages


@dataclass
class StageCall:
    """One stage's forward of one micro-batch, within the task's loss.

    Attributes:
        entered: values from the previous stage; empty for the first.
        left: values for the next stage; empty for the last.
        called: whether the loss has called the model.
    """

    stage: Stage
    entered: list[Any]
    left: list[Any] = field(default_factory=list)
    called: bool = False


class StopForward(BaseException):
    """Leaves the task's loss after a stage's forward, because only the last stage computes the rest.

    Not an ``Exception``, which the task might catch.
    """


class StageExecutor:
    """Replaces a model's forward.

    With a :attr:`turn` it computes one stage; without one, in an evaluation, it is a collective of the replica's ranks
    and returns the result on each.

    Torch's random state continues from stage to stage as in one process: it is sent along whenever a stage has drawn.

    Attributes:
        stages: of the whole model.
        turn: set while the task's loss is called for one stage.
        used: the trainable parameters with a gradient in the current step, on any rank, as a set of bits.

    Args:
        found: the model's blocks.
        stages: made of them.
        link: to the other ranks; rank r of R holds the stages r, r + R, ...
    """

    def __init__(self, found: Blocks, stages: Sequence[Stage], link: StageChannel) -> None:
        self._found = found
        self.stages = stages
        self.link = link
        self.turn: StageCall | None = None
        self.used = 0

    @property
    def own(self) -> list[Stage]:
        """The stages of this rank."""
        return [stage for stage in self.stages if self.rank_of(stage.number) == self.link.world.rank]

    def rank_of(self, stage: int) -> int:
        """Return the rank, within the model replica, that holds a stage."""
        return stage % self.link.world.world_size

    def is_last(self, stage: Stage) -> bool:
        """Return whether a stage computes the loss."""
        return stage.number == len(self.stages) - 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        turn = self.turn
        if turn is None:
            return self._all_stages(args, kwargs)
        if turn.called:
            raise TaskError(
                "the loss calls the model twice, but a pipeline runs it once per micro-batch. Call it once "
                "with both batches in one, or use --strategy ddp."
            )
        turn.called = True
        result, turn.left = self._run(turn.stage, turn.entered, args, kwargs)
        if not self.is_last(turn.stage):
            raise StopForward
        return result

    def _run(self, stage: Stage, entered: Sequence[Any], args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        """Return the result, of the last stage, and the values for the next stage, of the others."""
        values = self._found.bind(*args, **kwargs)
        state: Any = None
        if stage.enters:
            *received, state = entered
            values.update(zip(stage.enters, received, strict=True))
            _set_random(state, self.link.world.device)
        if self.is_last(stage):
            for block in stage.blocks:
                block.run(values)
            return self._found.result(values), []
        state_before = _random(self.link.world.device)
        for block in stage.blocks:
            block.run(values)
        state_after = _random(self.link.world.device)
        has_drawn = any(not torch.equal(a, b) for a, b in zip(state_before, state_after, strict=True))
        return None, [*(values[name] for name in stage.leaves), state_after if has_drawn else state]

    def _all_stages(self, args: Any, kwargs: Any) -> Any:
        """Return the whole model's result, without gradients, on every rank."""
        rank = self.link.world.rank
        last = len(self.stages) - 1
        with torch.no_grad():
            for stage in self.own:
                entered = []
                if stage.number:
                    address = MessageAddress(stage.number, EVALUATION)
                    entered = self.link.receive(self.rank_of(stage.number - 1), address)
                result, left = self._run(stage, entered, args, kwargs)
                if stage.number < last:
                    self.link.send(left, self.rank_of(stage.number + 1), MessageAddress(stage.number + 1, EVALUATION))
            address = MessageAddress(last + 1, EVALUATION)
            if rank == self.rank_of(last):
                values = pack(result)
                for first in range(0, len(values), _AT_ONCE):
                    self.link.broadcast(values[first : first + _AT_ONCE], address)
            else:
                messages = (self.link.receive(self.rank_of(last), address) for _ in itertools.count())
                result = unpack(itertools.chain.from_iterable(messages))
        self.link.wait()
        return tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def find_stage_executor(module: nn.Module) -> StageExecutor:
    """Return the forward of a model that was split into stages."""
    forward = module.forward
    assert isinstance(forward, StageExecutor)
    return forward


def _random(device: torch.device) -> tuple[torch.Tensor, ...]:
    host = torch.default_generator.get_state()
    return (host, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (host,)


def _set_random(state: tuple[torch.Tensor, ...] | None, device: torch.device) -> None:
    if state is None:
        return
    # A copy, because torch reads a state from the start of its storage, and this one is a part of a message.
    host, *of_device = (part.clone() for part in state)
    torch.default_generator.set_state(host)
    for part in of_device:
        torch.cuda.set_rng_state(part, device)
