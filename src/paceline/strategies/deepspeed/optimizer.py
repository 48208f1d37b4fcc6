"""The task's optimizer, whose steps DeepSpeed takes on this rank's flat part of the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import optim
from torch.optim import Optimizer

from paceline.distributed.sharded_state import ShardedOptimizer
from paceline.distributed.world import World, lost_peers_reported
from paceline.errors import ConfigError

ELEMENT_BY_ELEMENT = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.RMSprop, optim.Rprop, optim.Adadelta, optim.ASGD),
)
"""Optimizers that treat every element by itself: they may be given flat parts of parameters.

Not Adagrad, which DeepSpeed builds anew, whereby schedulers lose it.
"""


def require_element_by_element(optimizers: Mapping[str, Optimizer]) -> Optimizer:
    """The one optimizer, if DeepSpeed can shard it.

    Raises:
        ConfigError: there are several, or it cannot; says what can.
    """
    if len(optimizers) > 1:
        raise ConfigError(
            f"--strategy deepspeed works with one optimizer, but the task builds {len(optimizers)}: "
            f"{', '.join(optimizers)}. Use --strategy zero1 or fsdp."
        )
    (optimizer,) = optimizers.values()
    if not isinstance(optimizer, ELEMENT_BY_ELEMENT):
        known = ", ".join(kind.__name__ for kind in ELEMENT_BY_ELEMENT)
        raise ConfigError(
            "--strategy deepspeed gives an optimizer flat parts of the parameters, and it is not known that "
            f"{type(optimizer).__name__} treats each element by itself. Use one of {known}, or "
            "--strategy zero1."
        )
    if not all(any(p.requires_grad for p in group["params"]) for group in optimizer.param_groups):
        raise ConfigError(
            "--strategy deepspeed cannot shard a parameter group in which nothing is trained. "
            "Leave frozen parameters out of the optimizer, or use --strategy zero1."
        )
    return optimizer


class ZeroOptimizer(ShardedOptimizer):
    """Stands in the run's state for the task's optimizer.

    Its groups are those of the task's, so that schedulers reach them. Its state is that of one process.

    Args:
        module: the model, whose attribute ``zero_optimizer`` this becomes.
        base: the task's optimizer.
        parameters: of its groups, as they were before DeepSpeed put its flat parts there.
        engine: DeepSpeed's, which has the optimizer.
        stage: of ZeRO.
        world: the ranks.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        base: Optimizer,
        parameters: list[list[torch.nn.Parameter]],
        engine: Any,
        stage: int,
        world: World,
    ) -> None:
        super().__init__([parameter for group in parameters for parameter in group], {})
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults
        self.engine = engine
        self.stage = stage
        self._zero = engine.optimizer
        self._parameters = parameters
        self._world = world
        object.__setattr__(module, "zero_optimizer", self)
        self._api = import_module("deepspeed.utils")

    def gradients(self) -> list[torch.Tensor]:
        """This rank's parts of the sums over all ranks; there are some after a step's last backward."""
        groups = self._zero.averaged_gradients.values()
        return [part for group in groups if group is not None for part in group if part is not None]

    def discard(self) -> None:
        """Have no gradients, whatever became of those of the last step."""
        if self.stage == 3:
            # Its buffers stay, and a parameter that the next step does not use leaves its own as it is.
            for part in self.gradients():
                part.zero_()
            self._zero.averaged_gradients = {}
        else:
            for kept in (self._zero.averaged_gradients, self._zero.all_grad_tensors):
                for number in kept:
                    kept[number] = None
        self._zero.zero_grad(set_to_none=True)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step this rank's part, and gather those of the others."""
        assert closure is None
        self._world.activity.enter("all-gather")
        with lost_peers_reported():
            self._zero.step()
        self._world.activity.leave()

    def state_dict(self) -> dict[str, Any]:
        """The groups, numbered as in one process, without the state: see :meth:`whole_state`."""
        numbers = iter(range(sum(len(group) for group in self._parameters)))
        groups = []
        for group, parameters in zip(self.param_groups, self._parameters, strict=True):
            own = {name: value for name, value in group.items() if name != "params"}
            groups.append({**own, "params": [next(numbers) for _ in parameters]})
        return {"state": {}, "param_groups": groups}

    def whole_state(self, *, keep: bool) -> dict[int, dict[str, Any]]:
        """Each parameter's state by its number, on the CPU; all ranks call this together.

        Args:
            keep: whether this rank needs it; else it holds one tensor at a time.
        """
        whole: dict[int, dict[str, Any]] = {}
        self._link_states()
        self._world.activity.enter("gather")
        with lost_peers_reported():
            for flat, members in self._flat_parts():
                for number, parameter in members:
                    values = {}
                    for name, value in self.state[flat].items():
                        if isinstance(value, torch.Tensor) and value.shape == flat.shape:
                            value = self._api.safe_get_full_optimizer_state(parameter, name)
                        if isinstance(value, torch.Tensor):
                            value = value.detach().cpu().clone() if keep else None
                        values[name] = value
                    if keep and values:
                        whole[number] = values
        self._world.activity.leave()
        return dict(sorted(whole.items()))

    def load_state_dict(self, state_dict: Any) -> None:
        """Take over a state as one process has it; the model has its parameters by now.

        Raises:
            ValueError: it is of other parameter groups.
        """
        self._zero.refresh_fp32_params()
        saved_groups = state_dict["param_groups"]
        if [len(group["params"]) for group in saved_groups] != [len(group) for group in self._parameters]:
            raise ValueError("the saved optimizer's parameter groups differ from the task's")
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            group.update({k: v for k, v in saved.items() if k not in ("params", "param_names")})
        of_numbers = {int(number): values for number, values in state_dict["state"].items()}
        for flat, members in self._flat_parts():
            self.state.pop(flat, None)
            having = [(p, of_numbers[number]) for number, p in members if of_numbers.get(number)]
            if having:
                self.state[flat] = self._laid_out(flat, *having[0])
        self._link_states()
        for flat, members in self._flat_parts():
            for number, parameter in members:
                for name, value in of_numbers.get(number, {}).items():
                    if name in self.state[flat] and self.state[flat][name] is not value:
                        self._set_part(parameter, flat, name, value)

    def _link_states(self) -> None:
        """Have DeepSpeed find each parameter's state.

        It does so itself after the first group's first step, when the other groups have none yet.
        """
        if self.stage < 3:
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    @staticmethod
    def _laid_out(flat: torch.Tensor, parameter: torch.Tensor, values: Mapping[str, Any]) -> dict[str, Any]:
        """A flat part's state, with zeros for what each parameter has of its own."""
        shape = getattr(parameter, "ds_shape", parameter.shape)
        return {
            name: torch.zeros_like(flat) if _is_of(value, shape) else value for name, value in values.items()
        }

    def _set_part(self, parameter: Any, flat: torch.Tensor, name: str, value: Any) -> None:
        if not _is_of(value, getattr(parameter, "ds_shape", parameter.shape)):
            return  # a number, which all parameters of a group have in common
        value = value.to(flat.device, flat.dtype)
        if self.stage < 3:
            self._api.safe_set_full_optimizer_state(parameter, value, name)
            return
        # The function for whole tensors takes none whose size the ranks do not divide.
        size = parameter.ds_tensor.numel()
        part = torch.zeros(size, dtype=flat.dtype, device=flat.device)
        mine = value.flatten()[size * self._world.rank : size * (self._world.rank + 1)]
        part[: mine.numel()] = mine
        self._api.safe_set_local_optimizer_state(parameter, part, name)

    def _flat_parts(self) -> Iterator[tuple[torch.Tensor, list[tuple[int, torch.nn.Parameter]]]]:
        """This rank's flat parts, and whose parts are in each: parameters with their numbers."""
        zero = self._zero
        flats, groups = (
            (zero.fp32_partitioned_groups_flat, zero.fp16_groups)
            if self.stage == 3
            else (zero.single_partition_of_fp32_groups, zero.bit16_groups)
        )
        listed = [parameter for group in self._parameters for parameter in group]
        numbers = {id(parameter): number for number, parameter in enumerate(listed)}
        for flat, group in zip(flats, groups, strict=True):
            yield flat, [(numbers[id(parameter)], parameter) for parameter in group]


def optimizer_of(module: torch.nn.Module) -> ZeroOptimizer:
    """The one that DeepSpeed made of the task's, for this model."""
    optimizer = module.zero_optimizer
    assert isinstance(optimizer, ZeroOptimizer)
    return optimizer


def _is_of(value: Any, shape: torch.Size) -> bool:
    """Whether this is a state of each element of a parameter, and not a number of steps."""
    return isinstance(value, torch.Tensor) and value.shape == shape and value.dim() > 0
