"""The initial model: the task's, with the weights of another run, adapters, and frozen parameters.

Paceline reads the weights once, when the run is created, and keeps them in its directory: the parent may be deleted,
and every start has the same bits. All other changes to the model are a function of the options, made whenever the
model is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError, join_names
from paceline.runs.checkpoint_state import rename_entries
from paceline.training.reproducibility import seed_preparation
from paceline_fine_tuning.adapters import add_adapters
from paceline_fine_tuning.options import FineTuningOptions
from paceline_fine_tuning.parameters import freeze, matches, require_match


def initialise(module: nn.Module, config: RunConfig, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Change a model, as the task built it, into the one that is trained.

    Args:
        module: on the CPU, before it is laid out on the ranks.
        weights: those of another run, by name; None where the state that is trained comes later.

    Raises:
        ConfigError: the weights do not fit, an option matches nothing, or nothing is left to train.
    """
    options, fresh = config[FineTuningOptions], reinitialized_parameters(module, config)
    if weights is not None:
        assert options.init_from is not None
        _load(module, weights, options.init_from, fresh, options.reset)
    if options.lora is not None:
        seed_preparation(config.training.seed)
        add_adapters(module, options.lora)
    if options.freeze:
        freeze(module, options.freeze)


def reinitialized_parameters(module: nn.Module, config: RunConfig) -> set[str]:
    """Return the entries of the model's state that keep their values from the task."""
    options, state = config[FineTuningOptions], module.state_dict()
    fresh = {name for name in state for pattern in options.reset if matches(pattern, name)}
    if options.reset_head:
        head = last_layer(module)
        fresh |= {name for name in state if name.rpartition(".")[0] == head}
        named = dict(module.named_parameters(remove_duplicate=False))
        heads = {id(named[name]) for name in fresh & named.keys()}
        shared = [name for name, parameter in named.items() if name not in fresh and id(parameter) in heads]
        if shared:
            raise ConfigError(
                f"--reset-head: the last layer ({head}) shares its weights with {join_names(shared)}. Name "
                "the parameters to reinitialize with --reset."
            )
    return fresh


def last_layer(module: nn.Module) -> str:
    """Return the name of the last module that has parameters of its own."""
    *_, last = (name.rpartition(".")[0] for name, _ in module.named_parameters(remove_duplicate=False))
    return last


def _load(
    module: nn.Module,
    weights: Mapping[str, torch.Tensor],
    source: str,
    fresh: set[str],
    reset: Sequence[str],
) -> None:
    """Copy the weights of another run, except the reinitialized ones."""
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    for pattern in reset:
        require_match("--reset", pattern, module, others=weights)
    weights = rename_entries(weights, state)
    unused = {name for name in weights for pattern in reset if matches(pattern, name)}
    wanted = [name for name in state if name not in fresh]
    both = [name for name in wanted if name in weights and weights[name].shape != state[name].shape]
    problems = {
        "other shapes": {n: f"{n} is {tuple(weights[n].shape)} there and {tuple(state[n].shape)} here" for n in both},
        "missing there": {name: name for name in wanted if name not in weights},
        "not in the model": {name: name for name in weights if name not in state and name not in unused},
    }
    if any(problems.values()):
        raise ConfigError(_misfit(source, last_layer(module), problems))
    with torch.no_grad():
        for name in wanted:
            state[name].copy_(weights[name])


def _misfit(source: str, head: str, problems: Mapping[str, Mapping[str, str]]) -> str:
    """Describe the parameters that do not fit, by name, and the remedy."""
    lines = [f"--init-from {source}: the weights do not fit the task's model."]
    lines += [f"  {what}: {join_names(found.values())}" for what, found in problems.items() if found]
    wrong = [name for found in problems.values() for name in found]
    if all(name.rpartition(".")[0] == head for name in wrong):
        lines.append(f"Use --reset-head to reinitialize the last layer ({head}).")
    else:
        layers = dict.fromkeys(name.rpartition(".")[0] or name for name in wrong)
        options = " ".join(f"--reset {layer}" for layer in list(layers)[:4])
        more = " and so on" if len(layers) > 4 else ""
        lines.append(f"Reinitialize them with {options}{more}, or build the earlier model.")
    return "\n".join(lines)
