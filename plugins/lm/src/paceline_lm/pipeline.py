"""A model of ``transformers`` as a chain of its layers, for ``--strategy pp``.

The model's own forward runs in three parts. The first runs it up to the layers, and records the arguments of each.
Every layer is a part. The last one runs the modules after the layers, and then the head with their result. Arguments
such as masks and rotary embeddings go from stage to stage with the hidden states.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from paceline.core.errors import TaskError
from paceline.parallel.wrap_units import model_blocks

Part = tuple[Callable[..., Any], list[Any]]
_Carried = tuple[torch.Tensor, ...]
"""The arguments of the model and of its layers: a description, as bytes, and the tensors in it."""


def split_layers(model: PreTrainedModel) -> list[Part]:
    """Return the parts of a model's forward: a function each, and the modules and parameters that it uses.

    Raises:
        TaskError: the model's forward is not such a chain.
    """
    layers = _find_layers(model)
    base = model.base_model
    if base is model:
        raise _refusal(model, "the model has no head that computes a loss")
    if getattr(model.config, "output_router_logits", False):
        raise _refusal(model, "its loss needs the routers of all layers (output_router_logits)")
    ids = torch.zeros(2, 4, dtype=torch.int64, device=next(model.parameters()).device)
    chain = _Chain(model, layers, ids)
    later = {id(part) for module in (*layers, *chain.tail) for part in module.modules()}
    inside = {id(part) for part in base.modules()}
    before = [t for part in base.modules() if id(part) not in later for t in _own_tensors(part)]
    head = [t for part in model.modules() if id(part) not in inside for t in _own_tensors(part)]
    parts: list[Part] = [
        (chain.embed, before),
        *((partial(chain.run_layer, number), [layer]) for number, layer in enumerate(layers)),
        (chain.head, [*chain.tail, *head]),
    ]
    with evaluation_mode(model), torch.no_grad():
        value: Any = chain.embed(input_ids=ids, use_cache=False)
        for function, _ in parts[1:]:
            value = function(*value)
        if not torch.equal(value[0], model(input_ids=ids, use_cache=False)[0]):
            raise _refusal(model, "its layers in a chain have another result than the model")
    return parts


class _Chain:
    """The parts of a model's forward.

    Attributes:
        tail: the modules after the layers, each called with the result of the one before.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[nn.Module], ids: torch.Tensor) -> None:
        self._model = model
        self._layers = layers
        calls = _watch(model.base_model, ids)
        own = {id(layer) for layer in layers}
        numbers = [number for number, (module, _, _) in enumerate(calls) if id(module) in own]
        if [calls[number][0] for number in numbers] != list(layers):
            raise _refusal(model, "its forward does not call each layer once, in their order")
        value = None
        for number in numbers:
            _, inputs, output = calls[number]
            if value is not None and not (inputs and inputs[0] is value):
                raise _refusal(model, "a layer's first argument is not the result of the layer before")
            value = output[0] if isinstance(output, tuple) else output
        self._returns_tuple = [isinstance(calls[number][2], tuple) for number in numbers]
        self.tail: list[nn.Module] = []
        (_, _, result) = calls[-1]
        for module, inputs, output in calls[numbers[-1] + 1 : -1]:
            has_parameters = next(module.parameters(), None) is not None
            if inputs and inputs[0] is value and isinstance(output, torch.Tensor) and has_parameters:
                self.tail.append(module)
                value = output
        if value is None or not torch.equal(value.reshape(-1), result.last_hidden_state.reshape(-1)):
            raise _refusal(model, "what follows its layers is not a chain of modules")
        self._output = type(result)

    def embed(self, *args: Any, **kwargs: Any) -> _Carried:
        """Run the model up to its layers; returns what the first of them takes, and the arguments of all."""
        calls: list[tuple[Any, Any]] = []
        first: list[torch.Tensor] = []

        def record(number: int, hidden: torch.Tensor, *more: Any, **named: Any) -> Any:
            first.append(hidden)
            calls.append((more, named))
            if len(calls) == len(self._layers):
                raise _LayersReached
            return (hidden,) if self._returns_tuple[number] else hidden

        with ExitStack() as stack:
            for number, layer in enumerate(self._layers):
                stack.enter_context(replaced_forward(layer, partial(record, number)))
            try:
                type(self._model).forward(self._model, *args, **kwargs)
            except _LayersReached:
                return (first[0], *_carry({"model": (args, kwargs), "layers": calls}))
        raise _refusal(self._model, "its forward leaves out layers")

    def run_layer(self, number: int, hidden: torch.Tensor, *carried: torch.Tensor) -> _Carried:
        args, kwargs = _uncarry(carried)["layers"][number]
        output = self._layers[number](hidden, *args, **kwargs)
        return (output[0] if self._returns_tuple[number] else output, *carried)

    def head(self, hidden: torch.Tensor, *carried: torch.Tensor) -> Any:
        """Run what follows the layers; returns the model's output."""
        args, kwargs = _uncarry(carried)["model"]
        for module in self.tail:
            hidden = module(hidden)
        with replaced_forward(self._model.base_model, lambda *_, **__: self._output(last_hidden_state=hidden)):
            return type(self._model).forward(self._model, *args, **kwargs)


class _LayersReached(BaseException):
    """Not an ``Exception``, which the model might catch."""


def _find_layers(model: PreTrainedModel) -> list[nn.Module]:
    blocks = model_blocks(model)
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and any(part[0] is b for b in blocks)]
    if len(lists) != 1 or len(blocks) != len(lists[0]):
        found = f"{len(lists)} lists of layers" if lists else "no list of layers"
        raise _refusal(model, f"it has {found}, and a pipeline needs one")
    return list(lists[0])


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _watch(base: nn.Module, ids: torch.Tensor) -> list[tuple[nn.Module, tuple[Any, ...], Any]]:
    """Return the calls of modules, in the order in which they ended, each with its arguments and its result."""
    calls: list[tuple[nn.Module, tuple[Any, ...], Any]] = []
    hooks = [m.register_forward_hook(lambda m, inputs, out: calls.append((m, inputs, out))) for m in base.modules()]
    try:
        with evaluation_mode(base), torch.no_grad():
            base(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward, which may already be another than its class's."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if before is not None:
            module.__dict__["forward"] = before


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Have no dropout within the context."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _carry(values: Any) -> _Carried:
    """Pack values; a tensor that occurs several times is there once."""
    tensors: dict[int, torch.Tensor] = {}

    def number(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.setdefault(id(value), value)
            return {"tensor": list(tensors).index(id(value))}
        raise TaskError(
            f"--strategy pp: a layer of the model is called with a {type(value).__name__}, which cannot be sent to "
            "another stage. Use --strategy fsdp."
        )

    text = json.dumps(values, default=number).encode()
    return (torch.frombuffer(bytearray(text), dtype=torch.uint8), *tensors.values())


def _uncarry(carried: _Carried) -> Any:
    description, *tensors = carried

    def resolve(value: dict[str, Any]) -> Any:
        return tensors[value["tensor"]] if value.keys() == {"tensor"} else value

    return json.loads(bytes(description.cpu().numpy()), object_hook=resolve)


def _refusal(model: nn.Module, reason: str) -> TaskError:
    return TaskError(
        f"--strategy pp cannot split a {type(model).__name__}: {reason}. Use --strategy fsdp, or define "
        "pipeline_blocks in the task."
    )
