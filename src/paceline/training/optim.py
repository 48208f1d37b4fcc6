"""Parts of the optimizer: averages, loss scaling, learning rates of parameters, and its state by parameters' names."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer, SparseAdam
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paceline.core.errors import TaskError
from paceline.parallel.sharded_state import ShardedOptimizer, has_common_state, is_distributed, local_shard
from paceline.parallel.world import World
from paceline.torch_internals import PartsGradScaler, foreach_copy_

# --- The moving average of the weights ---


class EMA(AveragedModel):
    """torch's exponential moving average, of parameters that may be distributed: each rank averages its part.

    Floating-point buffers are averaged too (batch norm's statistics). Buffers without a mean are copied: integers
    (position ids, counters) and masks with infinities. A parametrization derives its own buffers (spectral norm's
    singular vectors) from the averaged weight.

    Args:
        module: a second model, laid out as the first and equal to it, that becomes the average.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        # AveragedModel would copy the model, which a sharded one does not allow.
        super().__init__(nn.Module(), multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)  # type: ignore[no-untyped-call]
        self.module = module
        self._parametrizations = [
            child
            for child in module.modules()
            if isinstance(child, ParametrizationList) and any(True for _ in child.buffers())
        ]
        derived = {id(buffer) for child in self._parametrizations for buffer in child.buffers()}
        self._updates: list[Literal["average", "copy", "derive"]] = []
        self._updates += ["copy" if p.dtype == torch.uint8 else "average" for p in module.parameters()]  # quantized
        for buffer in module.buffers():
            has_mean = buffer.is_floating_point() or buffer.is_complex()
            has_mean = has_mean and bool(local_shard(buffer).isfinite().all())
            if id(buffer) in derived:
                self._updates.append("derive")
            else:
                self._updates.append("average" if has_mean else "copy")

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Move the average towards the model."""
        pairs = zip(_state_parts(self.module), _state_parts(model), self._updates, strict=True)
        groups: dict[tuple[torch.dtype, torch.device, str], list[tuple[torch.Tensor, torch.Tensor]]]
        groups = defaultdict(list)
        for average, value, update in pairs:
            groups[average.dtype, average.device, "copy" if self.n_averaged == 0 else update].append((average, value))
        for (_, _, kind), group in groups.items():
            averages, values = ([pair[side] for pair in group] for side in (0, 1))
            if kind == "copy":
                foreach_copy_(averages, values)
            elif kind == "average":
                assert self.multi_avg_fn is not None
                self.multi_avg_fn(averages, values, self.n_averaged)
        self._derive_buffers()
        self.n_averaged += 1

    def _derive_buffers(self) -> None:
        """Have parametrizations renew their buffers from the averaged weights."""
        for parametrizations in self._parametrizations:
            originals = (
                [parametrizations.original]
                if hasattr(parametrizations, "original")
                else [getattr(parametrizations, f"original{index}") for index in range(parametrizations.ntensors)]
            )
            value = [_full(original) for original in originals]
            for parametrization in parametrizations:
                is_training = parametrization.training
                value = [parametrization.train()(*value)]
                parametrization.train(is_training)


def _full(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if is_distributed(tensor) else tensor
    return whole


def _state_parts(module: nn.Module) -> list[torch.Tensor]:
    tensors = itertools.chain(module.parameters(), module.buffers())
    return [local_shard(tensor.detach()) for tensor in tensors]


# --- A gradient scaler for parameters of which each rank may hold a part ---


LEAST_SCALE = 2.0**-14
"""The smallest normal number of a half: gradients that it does not bring into range are not finite at all."""


class ShardedGradScaler(PartsGradScaler):
    """Unscales what this rank holds of each gradient, and skips a step for all optimizers or for none.

    torch's takes no plain parameters together with distributed ones, and decides for each optimizer: a step that
    only one of them applied would be neither a step nor a skipped one. The gradients of other ranks
    it does not see: whether all of it is finite, the ranks agree on before.
    """

    def unscale_all(self, optimizers: Collection[Optimizer], *, finite: bool) -> bool:
        """Unscale the gradients of a step.

        Args:
            optimizers: of all parameters.
            finite: whether the gradients of all ranks are.

        Returns:
            Whether the optimizers apply it: none does if a gradient is not finite.
        """
        for optimizer in optimizers:
            self.unscale_(optimizer)
        found = [inf for optimizer in optimizers for inf in self.found_infs(optimizer)]
        finite = finite and not torch.stack([inf.to(found[0].device) for inf in found]).any().item()
        if not finite:
            for inf in found:
                inf.fill_(1.0)
        self._applies = finite
        return finite

    def step(self, optimizer: Optimizer, *arguments: Any, **options: Any) -> float | None:
        """Step an optimizer if :meth:`unscale_all` has said so; torch's would ask the GPU for each."""
        return optimizer.step(*arguments, **options) if self._applies else None

    def parts(self, optimizer: Optimizer) -> list[torch.Tensor]:
        parts = []
        if isinstance(optimizer, ShardedOptimizer):
            for gradient in optimizer.gradients():
                part = gradient.detach()
                part.grad = gradient
                parts.append(part)
            return parts
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    part = local_shard(parameter.detach())
                    part.grad = local_shard(parameter.grad)
                    parts.append(part)
        return parts


# --- Learning rates that differ within a model ---


LR_FACTOR = "paceline_lr_scale"
"""The key of a parameter group's factor; its ``lr`` stays what the task and its schedulers make of it."""


def current_lr(group: Mapping[str, Any]) -> Any:
    """Return the learning rate of a group's parameters."""
    return group["lr"] * group.get(LR_FACTOR, 1.0)


@contextmanager
def scaled_lr(optimizers: Mapping[str, Optimizer]) -> Iterator[None]:
    """Within, each group's ``lr`` is what updates its parameters; afterwards it is as before."""
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
    groups = [group for group in groups if group.get(LR_FACTOR, 1.0) != 1.0]
    before = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = current_lr(group)
    try:
        yield
    finally:
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr


@contextmanager
def sparse_gradients(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Within, parameters of ``SparseAdam`` have sparse gradients of their non-zero rows; afterwards dense ones again.

    The ranks sum dense gradients, but that optimizer takes none.
    """
    parameters = [
        parameter
        for optimizer in optimizers
        if isinstance(optimizer, SparseAdam)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None and not parameter.grad.is_sparse
    ]
    dense = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = parameter.grad.to_sparse(1)
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, dense, strict=True):
            parameter.grad = gradient


# --- The state of an optimizer by the names of the model's parameters, which do not depend on any order ---
#
# torch numbers the parameters in the order of the groups, and a task may take this order from a set: then it differs
# from process to process. So each group is sorted once, when it is built, and what leaves the process goes by names.


GroupNames: TypeAlias = Sequence[Sequence[str]]
"""The names of the parameters of each group, in their order; of a tied parameter the first name."""


def sort_parameters(name: str, optimizer: Optimizer, module: nn.Module) -> None:
    """Put the parameters of each group into the order of the model, in place.

    Raises:
        TaskError: the model does not have one of them.
    """
    position_of = {id(parameter): position for position, parameter in enumerate(module.parameters())}
    for number, group in enumerate(optimizer.param_groups):
        parameters = group["params"]
        if foreign := [p for p in parameters if id(p) not in position_of]:
            raise TaskError(
                f"build_optimizer gives group {number} of the optimizer {name!r} a parameter of shape "
                f"{tuple(foreign[0].shape)} that the model does not have: its gradients would not be summed over the "
                "micro-batches, nor its value saved. Make it a parameter of the module that build_model returns, and "
                "take all parameters from build_optimizer's argument."
            )
        order = sorted(range(len(parameters)), key=lambda index: position_of[id(parameters[index])])
        for key in ("params", "param_names"):
            if key in group:
                group[key][:] = [group[key][index] for index in order]  # LBFGS keeps the list


def group_names(optimizer: Optimizer, module: nn.Module) -> list[list[str]]:
    """Return the names of the parameters of each group."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def named_state(state: Mapping[str, Any], names: GroupNames) -> dict[str, Any]:
    """Return an optimizer's ``state_dict()`` with names in place of numbers; one of a form of its own is unchanged.

    A parameter without a state has no entry. Entries are in the order of the groups; those of no parameter follow.

    Args:
        state: by numbers.
        names: of the parameters that are numbered.

    Raises:
        ValueError: the groups have other numbers of parameters.
    """
    if not has_common_state(state):
        return dict(state)
    groups = [group["params"] for group in state["param_groups"]]
    if [len(group) for group in groups] != [len(group) for group in names]:
        raise ValueError(f"its optimizer's groups have {_sizes(groups)} parameters, the task's have {_sizes(names)}")
    name_of = dict(zip(itertools.chain(*groups), itertools.chain(*names), strict=True))
    return ordered_state(
        {
            **state,
            "state": {name_of.get(key, key): values for key, values in state["state"].items()},
            "param_groups": [
                {**_without_names(group), "params": list(own)}
                for group, own in zip(state["param_groups"], names, strict=True)
            ],
        }
    )


def ordered_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state by names with its entries in the order of the groups."""
    if not has_common_state(state):
        return dict(state)
    entries = state["state"]
    order = [name for group in state["param_groups"] for name in group["params"] if name in entries]
    return {**state, "state": {name: entries[name] for name in order} | dict(entries)}


def numbered_state(name: str, state: Mapping[str, Any], names: GroupNames) -> dict[str, Any]:
    """Return what an optimizer's ``load_state_dict`` takes: the reverse of :func:`named_state`.

    Args:
        name: the optimizer's, for messages.
        state: by names.
        names: of the optimizer's parameters, as they are now.

    Raises:
        ValueError: a group has another parameter than the saved one.
    """
    if not has_common_state(state):
        return dict(state)
    saved_groups = [group["params"] for group in state["param_groups"]]
    if difference := describe_difference(saved_groups, names, "the checkpoint", "the task"):
        raise ValueError(f"{difference} of the optimizer {name!r}")
    number_of = {parameter: number for number, parameter in enumerate(itertools.chain(*names))}
    return {
        **state,
        "state": {number_of.get(key, key): values for key, values in ordered_state(state)["state"].items()},
        "param_groups": [
            {**_without_names(group), "params": [number_of[parameter] for parameter in own]}
            for group, own in zip(state["param_groups"], names, strict=True)
        ],
    }


def is_numbered(state: Mapping[str, Any]) -> bool:
    """Return whether an optimizer's state goes by numbers, as in checkpoints of format 1."""
    keys = [key for group in state["param_groups"] for key in group["params"]] if has_common_state(state) else []
    return any(type(key) is int for key in keys)


def require_shapes(state: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Reject a state of format 1 that was numbered in another order.

    Args:
        state: by names, as far as the order is right.
        model: the saved tensors of the model.

    Raises:
        ValueError: names the first parameter with a state of another one's shape.
    """
    values_of: dict[str, dict[str, torch.Tensor]] = {}
    for name, values in state["state"].items():
        for key, value in values.items() if isinstance(values, Mapping) else ():
            if isinstance(value, torch.Tensor) and name in model:
                values_of.setdefault(key, {})[name] = value
    for key, of_names in values_of.items():
        wrong = [name for name, value in of_names.items() if value.shape != model[name].shape]
        # Some states have shapes of their own, such as Adafactor's rows and columns.
        if wrong and Counter(value.shape for value in of_names.values()) == Counter(
            model[name].shape for name in of_names
        ):
            raise ValueError(
                f"it lists the optimizer's parameters without names, in another order than the task: {key} of "
                f"{wrong[0]!r} has the shape {tuple(of_names[wrong[0]].shape)}, not {tuple(model[wrong[0]].shape)}"
            )


def describe_difference(one: GroupNames, other: GroupNames, where: str, elsewhere: str) -> str | None:
    """Return the first difference of two lists of groups, whatever the order in a group; None if there is none."""
    for number, (here, there) in enumerate(itertools.zip_longest(one, other, fillvalue=())):
        for names, others, has, has_not in ((here, set(there), where, elsewhere), (there, set(here), elsewhere, where)):
            if name := next((name for name in names if name not in others), None):
                return f"{has} has {name!r}, and {has_not} has not, in group {number}"
    return None if len(one) == len(other) else f"{where} has {len(one)} groups, and {elsewhere} has {len(other)},"


def require_equal_groups(world: World, names: Mapping[str, GroupNames]) -> None:
    """Reject optimizers whose groups differ between the ranks; all ranks call this together.

    Args:
        names: of the parameters of each group of this rank's optimizers, by the names of these.

    Raises:
        TaskError: names the first difference from rank 0.
    """
    digest = hashlib.sha256(repr([*names.items()]).encode()).hexdigest()
    if len(set(world.all_gather_object(digest))) == 1:
        return
    first: dict[str, GroupNames] = world.broadcast_object(dict(names))
    rank, rank_0, difference = f"rank {world.rank}", "rank 0", None
    if [*first] != [*names]:
        difference = f"{rank_0} has the optimizers {', '.join(first)}, and {rank} has {', '.join(names)}"
    else:
        for name, groups in first.items():
            if found := describe_difference(groups, names[name], rank_0, rank):
                difference = difference or f"{found} of the optimizer {name!r}"
    differences = [found for found in world.all_gather_object(difference) if found]
    raise TaskError(
        f"build_optimizer does not give all ranks the same groups: {differences[0]}. Make groups and optimizers from "
        "lists, not from sets, whose order differs from process to process."
    )


def _without_names(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group without the names that its task gave: those of the module stand in ``params``."""
    return {key: value for key, value in group.items() if key != "param_names"}


def _sizes(groups: Iterable[Sequence[Any]]) -> str:
    return ", ".join(str(len(group)) for group in groups) or "no"
