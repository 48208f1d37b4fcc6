"""How a model is cut into blocks, and how a stage runs its own."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.utils._pytree import tree_map_only

from paceline.core.errors import TaskError
from paceline.parallel.pipeline.channel import EVALUATION, MessageAddress, StageChannel, pack, unpack

# --- A model as a sequence of blocks between which it can be cut ---


Values = dict[str, Any]
"""What a forward has computed so far, by name."""


@dataclass(frozen=True)
class PipelineBlock:
    """A stretch of a model's forward.

    Attributes:
        name: for people.
        run: computes what the block gives, from a mapping that holds what it needs, into it.
        needs: names of the values it reads.
        gives: names of the values it computes, in order.
        holds: names of the parameters and buffers that it uses, as the model first calls them.
        count: how many of the model's own parts it is, each with parameters of its own.
    """

    name: str
    run: Callable[[Values], None]
    needs: frozenset[str]
    gives: tuple[str, ...]
    holds: frozenset[str]
    count: int = 1


@dataclass(frozen=True)
class Blocks:
    """A model's forward, as a sequence of blocks.

    Attributes:
        blocks: in the order in which they run.
        bind: the values that a call begins with, from its arguments; every rank has these.
        result: what the call returns, from the values that ``result_needs`` names.
        result_needs: names of values.
        shared: parameters that keep blocks together, each with the blocks that it is in.
        closed: blocks that were made of several, as ranks hold different features between them.
    """

    blocks: tuple[PipelineBlock, ...]
    bind: Callable[..., Values]
    result: Callable[[Values], Any]
    result_needs: frozenset[str]
    shared: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()

    def crossing(self, cut: int) -> tuple[str, ...]:
        """The values that are computed before block ``cut`` and needed by it or later, in order."""
        later = self.result_needs.union(*(block.needs for block in self.blocks[cut:]))
        names = dict.fromkeys(name for block in self.blocks[:cut] for name in block.gives)
        return tuple(name for name in names if name in later)


def find_blocks(module: nn.Module, parts: Sequence[Any] | None, absent: frozenset[str] = frozenset()) -> Blocks:
    """The blocks of a model, of which no two share a parameter or a buffer.

    Args:
        module: the model.
        parts: what ``Task.pipeline_blocks`` returned; None to find the blocks by tracing ``forward``.
        absent: the arguments of ``forward`` that are None when it is called, which a trace depends on.

    Raises:
        TaskError: ``forward`` cannot be traced, or ``parts`` are not what they should be.
    """
    found = _traced(module, absent) if parts is None else _given(module, parts)
    return _without_shared(found)


def _without_shared(found: Blocks) -> Blocks:
    """Merge blocks that use the same parameter or buffer, with all between them."""
    found = replace(found, blocks=_with_parameters(found.blocks))
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, block in enumerate(found.blocks):
        for name in block.holds:
            first.setdefault(name, number)
            last[name] = number
    shared = tuple(
        f"{name} (in {found.blocks[first[name]].name} and {found.blocks[last[name]].name})"
        for name in sorted(first)
        if first[name] != last[name]
    )
    kept: list[PipelineBlock] = []
    pending: list[PipelineBlock] = []
    open_until = -1
    for number, block in enumerate(found.blocks):
        pending.append(block)
        open_until = max([open_until, *(last[name] for name in block.holds)])
        if open_until <= number:
            kept.append(merge_blocks(pending))
            pending = []
    return replace(found, blocks=tuple(kept), shared=shared)


def _with_parameters(blocks: Sequence[PipelineBlock]) -> tuple[PipelineBlock, ...]:
    """Each block that has none, merged with the one before it; the first ones with the one after them."""
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
    """Neighbours as one block."""
    if len(blocks) == 1:
        return blocks[0]
    gives = tuple(name for block in blocks for name in block.gives)
    runs = [block.run for block in blocks]

    def run(values: Values) -> None:
        for each in runs:
            each(values)

    return PipelineBlock(
        name=f"{blocks[0].name} to {blocks[-1].name}",
        run=run,
        needs=frozenset(n for block in blocks for n in block.needs).difference(gives),
        gives=gives,
        holds=frozenset(n for block in blocks for n in block.holds),
        count=sum(block.count for block in blocks),
    )


# --- given by the task


def _given(module: nn.Module, parts: Sequence[Any]) -> Blocks:
    """A chain: each part is called with what the one before returned, a tuple unpacked."""
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
        given = values[before]
        values[after] = function(*given) if isinstance(given, tuple) else function(given)

    named = part if isinstance(part, nn.Module) else function
    name = getattr(named, "__name__", type(named).__name__)
    return PipelineBlock(f"{number} {name}", run, frozenset({before} if number else {"arguments"}), (after,), holds)


# --- found by tracing


class _Tracer(fx.Tracer):
    """Looks into containers only: what a block does inside stays its own."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, nn.Sequential):
            return False
        return not any(isinstance(child, nn.ModuleList) and len(child) > 1 for child in m.children())


def _traced(module: nn.Module, absent: frozenset[str]) -> Blocks:
    was_training = module.training
    texts = []
    try:
        for mode in (False, True):
            module.train(mode)
            graph = _Tracer().trace(module, concrete_args=dict.fromkeys(absent) or None)
            for node in reversed(graph.nodes):
                if getattr(node.target, "__name__", "") == "_assert_is_none" or (
                    node.op == "placeholder" and not node.users
                ):
                    graph.erase_node(node)
            texts.append(str(graph))
    except Exception as error:  # whatever a forward does that cannot be traced
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _unsplittable(module, reason) from error
    finally:
        module.train(was_training)
    if texts[0] != texts[1]:
        raise _unsplittable(module, "it does something else in training than in evaluation")
    signature = inspect.signature(module.forward)
    return _blocks_of(module, graph, signature, absent)


def _unsplittable(module: nn.Module, reason: str) -> TaskError:
    return TaskError(
        f"the forward of {type(module).__name__} cannot be cut into blocks: {reason}. Name its parts in the "
        "task: def pipeline_blocks(self, model), as docs/pipeline.md shows."
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
                f"the model is called once with and once without {named}, and cut for one of the two. "
                "Call it alike, or name its parts in the task: def pipeline_blocks(self, model)."
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
    return lambda: getattr(holder, attribute)  # as it is now: stages replace what they do not hold


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
    """The first name of each parameter and buffer, by its ``id``."""
    names: dict[int, str] = {}
    for named in (module.named_parameters(), module.named_buffers()):
        for name, tensor in named:
            names.setdefault(id(tensor), name)
    return names


def absent_arguments(module: nn.Module, trial: Callable[[nn.Module], Any]) -> frozenset[str]:
    """The arguments of ``forward`` that are None when ``trial`` calls the module, which is not run.

    Raises:
        TaskError: it does not call it.
    """
    signature = inspect.signature(module.forward)
    found: list[frozenset[str]] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        found.append(frozenset(name for name, value in bound.arguments.items() if value is None))
        raise _Called

    with torch.random.fork_rng([]), replace_forward(module, forward):
        try:
            trial(module)
        except _Called:
            return found[0]
    raise TaskError("the loss does not call the model, so a pipeline has nothing to run.")


class _Called(BaseException):
    """Not an ``Exception``, which the task may catch."""


@contextmanager
def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within, calls of the module call ``forward``."""
    object.__setattr__(module, "forward", forward)
    try:
        yield
    finally:
        object.__delattr__(module, "forward")


# --- Stages whose layers are split over ranks once more: what a pipeline asks of whoever splits them ---


class LayerSplitting(Protocol):
    """Splits the layers of a stage over the ranks that hold this stage of one copy of the model.

    Attributes:
        degree: how many ranks these are.
    """

    @property
    def degree(self) -> int: ...

    def decide(self, module: nn.Module) -> Mapping[str, bool]:
        """How the layers of the whole model are to be split, which :meth:`split` then does.

        Returns:
            The parameters, in the model's order, of layers whose output is split (True) and of those that
            take such an output in (False): between them, ranks hold different features.

        Raises:
            ConfigError: they cannot be shared by so many ranks.
            TaskError: the task's plan is not for its model.
        """

    def split(self, module: nn.Module) -> None:
        """Split the layers that are here: those whose parameters are not on the ``meta`` device."""

    def full(self, state: Any, *, keep: bool) -> Any:
        """As :meth:`paceline.parallel.strategy.ParameterLayout.full`."""


def closed(found: Blocks, splits: Mapping[str, bool]) -> Blocks:
    """The same, with no cut where ranks hold different features: random numbers differ there, too.

    Args:
        found: the model's blocks.
        splits: as :meth:`Splitting.decide` returns it.
    """
    kept: list[PipelineBlock] = []
    pending: list[PipelineBlock] = []
    for block in found.blocks:
        pending.append(block)
        marks = [opens for name, opens in splits.items() if name in block.holds]
        is_open = marks[-1] if marks else len(pending) > 1
        if not is_open:
            kept.append(merge_blocks(pending))
            pending = []
    if pending:
        kept.append(merge_blocks(pending))
    names = {block.name for block in found.blocks}
    return replace(found, blocks=tuple(kept), closed=tuple(block.name for block in kept if block.name not in names))


# --- A model of which this rank holds some stages: what its forward is then ---


_AT_ONCE = 12  # values of a result in a message, which can describe so many tensors of any usual rank


@dataclass(frozen=True)
class Stage:
    """A stretch of blocks.

    Attributes:
        number: from 0.
        blocks: in order.
        enters: the names of the values that come from the stage before.
        leaves: of those that go to the next one.
        holds: names of its parameters and buffers.
    """

    number: int
    blocks: tuple[PipelineBlock, ...]
    enters: tuple[str, ...]
    leaves: tuple[str, ...]
    holds: frozenset[str]


def cut(found: Blocks, sizes: Sequence[int]) -> list[Stage]:
    """Stages of so many blocks each."""
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
        stage: which.
        entered: what the stage before gave; none for the first.
        left: what goes to the next stage; none for the last.
        called: whether the loss has called the model.
    """

    stage: Stage
    entered: list[Any]
    left: list[Any] = field(default_factory=list)
    called: bool = False


class StopForward(BaseException):
    """Leaves the task's loss after a stage's forward: the rest of it is the last stage's rank's.

    Not an ``Exception``, which the task may catch.
    """


class StageExecutor:
    """Takes the place of a model's forward.

    In a :attr:`turn` it computes one stage; otherwise, in an evaluation, all ranks of the copy call it
    together, and each gets the result.

    Torch's random numbers go on from stage to stage as they do in one process: the state of the generators
    travels along wherever a stage has drawn.

    Attributes:
        stages: of the whole model.
        turn: set while the task's loss is called for one stage.

    Args:
        found: the model's blocks.
        stages: of them.
        link: to the other ranks; rank r of R holds the stages r, r + R, ...
    """

    def __init__(self, found: Blocks, stages: Sequence[Stage], link: StageChannel) -> None:
        self._found = found
        self.stages = stages
        self.link = link
        self.turn: StageCall | None = None

    @property
    def own(self) -> list[Stage]:
        """The stages of this rank."""
        return [stage for stage in self.stages if self.rank_of(stage.number) == self.link.world.rank]

    def rank_of(self, stage: int) -> int:
        """Who holds a stage, by its rank in the copy of the model."""
        return stage % self.link.world.world_size

    def is_last(self, stage: Stage) -> bool:
        """Whether the loss follows."""
        return stage.number == len(self.stages) - 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        turn = self.turn
        if turn is None:
            return self._all_stages(args, kwargs)
        if turn.called:
            raise TaskError(
                "the loss calls the model twice, and a pipeline runs it once for a micro-batch. Call it once "
                "with both batches in one, or use --strategy ddp."
            )
        turn.called = True
        result, turn.left = self._run(turn.stage, turn.entered, args, kwargs)
        if not self.is_last(turn.stage):
            raise StopForward
        return result

    def _run(self, stage: Stage, entered: Sequence[Any], args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        """The result, of the last stage, and what goes to the next one, of the others."""
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
        before = _random(self.link.world.device)
        for block in stage.blocks:
            block.run(values)
        now = _random(self.link.world.device)
        drawn = any(not torch.equal(a, b) for a, b in zip(before, now, strict=True))
        return None, [*(values[name] for name in stage.leaves), now if drawn else state]

    def _all_stages(self, args: Any, kwargs: Any) -> Any:
        """The whole model's result, without gradients, on every rank."""
        rank, ranks = self.link.world.rank, self.link.world.world_size
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
                for other in range(ranks):
                    if other != rank:
                        for first in range(0, len(values), _AT_ONCE):
                            self.link.send(values[first : first + _AT_ONCE], other, address)
            else:
                messages = (self.link.receive(self.rank_of(last), address) for _ in itertools.count())
                result = unpack(itertools.chain.from_iterable(messages))
        self.link.wait()
        return tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def find_stage_executor(module: nn.Module) -> StageExecutor:
    """The forward of a model that was laid out in stages."""
    forward = module.forward
    assert isinstance(forward, StageExecutor)
    return forward


def _random(device: torch.device) -> tuple[torch.Tensor, ...]:
    host = torch.default_generator.get_state()
    return (host, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (host,)


def _set_random(state: tuple[torch.Tensor, ...] | None, device: torch.device) -> None:
    if state is None:
        return
    # A copy: torch takes a state from where its memory begins, and this one is a part of a message.
    torch.default_generator.set_state(state[0].cpu().clone())
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1].cpu().clone(), device)
