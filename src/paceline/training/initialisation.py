"""What a run begins with: weights of another run, adapters, and which parameters are trained.

Weights are read once, when the run is created, and kept in its directory: the parent may be deleted, and
whoever begins again begins with the same bits. What else is done to the model is a function of the options,
done whenever the model is built.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.training.adapters import add_adapters
from paceline.training.patterns import listed, names, require_match
from paceline.training.randomness import seed_adapters


def initialise(
    module: nn.Module, config: RunConfig, weights: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Change a model, as the task built it, into the one that is trained.

    Args:
        module: on the CPU, before it is laid out on the ranks.
        config: the run's options.
        weights: those of another run, by name; None where the state that is trained comes later.

    Raises:
        ConfigError: the weights do not fit, an option matches nothing, or nothing is left to train.
    """
    anew = names_of_the_new(module, config)
    if weights is not None:
        assert config.init_from is not None
        _load(module, weights, config.init_from, anew, config.reset)
    if config.adapters is not None:
        seed_adapters(config.seed)
        add_adapters(module, config.adapters)
    if config.freeze:
        freeze(module, config.freeze)


def names_of_the_new(module: nn.Module, config: RunConfig) -> set[str]:
    """The entries of the model's state that keep the values that the task gave them.

    Raises:
        ConfigError: there is no such layer, or the last one shares its weights.
    """
    state = module.state_dict()
    anew = {name for name in state for pattern in config.reset if names(pattern, name)}
    if config.reset_head:
        head = last_layer(module)
        anew |= {name for name in state if name.rpartition(".")[0] == head}
        shared = [
            name
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if name not in anew and any(parameter is module.get_parameter(own) for own in anew & _own(module))
        ]
        if shared:
            raise ConfigError(
                f"--reset-head: the last layer ({head}) shares its weights with {listed(shared)}. Name what "
                "is to begin anew with --reset."
            )
    return anew


def last_layer(module: nn.Module) -> str:
    """The name of the last module that has parameters of its own."""
    *_, last = (name.rpartition(".")[0] for name, _ in module.named_parameters(remove_duplicate=False))
    return last


def _own(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters(remove_duplicate=False)}


def _load(
    module: nn.Module,
    weights: Mapping[str, torch.Tensor],
    source: str,
    anew: set[str],
    reset: Sequence[str],
) -> None:
    """Copy the weights of another run, but those that are to begin anew."""
    state = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    for pattern in reset:
        require_match("--reset", pattern, module, others=weights)
    unused = {name for name in weights for pattern in reset if names(pattern, name)}
    wanted = [name for name in state if name not in anew]
    missing = [name for name in wanted if name not in weights]
    unexpected = [name for name in weights if name not in state and name not in unused]
    reshaped = [n for n in wanted if n in weights and weights[n].shape != state[n].shape]
    if missing or unexpected or reshaped:
        raise ConfigError(_misfit(module, source, weights, state, missing, unexpected, reshaped))
    with torch.no_grad():
        for name in wanted:
            state[name].copy_(weights[name])


def _misfit(
    module: nn.Module,
    source: str,
    weights: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    missing: Sequence[str],
    unexpected: Sequence[str],
    reshaped: Sequence[str],
) -> str:
    """What does not fit, by name, and what helps."""
    shapes = (f"{n} is {tuple(weights[n].shape)} there and {tuple(state[n].shape)} here" for n in reshaped)
    lines = [f"--init-from {source}: the weights do not fit the task's model."]
    lines += [f"  other shapes: {listed(shapes)}"] if reshaped else []
    lines += [f"  missing there: {listed(missing)}"] if missing else []
    lines += [f"  not in the model: {listed(unexpected)}"] if unexpected else []
    head = last_layer(module)
    wrong = [*missing, *unexpected, *reshaped]
    if all(name.rpartition(".")[0] == head for name in wrong):
        lines.append(f"Use --reset-head to begin the last layer ({head}) anew.")
    else:
        layers = dict.fromkeys(name.rpartition(".")[0] or name for name in wrong)
        options = " ".join(f"--reset {layer}" for layer in list(layers)[:4])
        more = " and so on" if len(layers) > 4 else ""
        lines.append(f"Begin them anew with {options}{more}, or build the model as it was.")
    return "\n".join(lines)


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Have parameters keep their values, and batch norms of which all are frozen keep their statistics.

    Such a batch norm stays in evaluation mode, as everywhere in the field: it normalises with the statistics
    that it has (https://keras.io/guides/transfer_learning).

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    for pattern in patterns:
        require_match("--freeze", pattern, module, others=module.state_dict())
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if any(names(pattern, name) for pattern in patterns):
            parameter.requires_grad_(False)
    for name, layer in module.named_modules():
        if isinstance(layer, _NormBase) and _keeps_statistics(name, layer, patterns):
            # On the module itself: Module.train() of what holds it asks each part.
            object.__setattr__(layer, "train", types.MethodType(_stays_in_evaluation, layer))
            layer.train()
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(f"--freeze {' --freeze '.join(patterns)} leaves nothing to train.")


def _keeps_statistics(name: str, layer: nn.Module, patterns: Sequence[str]) -> bool:
    """Whether all parameters of a batch norm are frozen, or it has none and its statistics are named."""
    own = [entry for entry, _ in layer.named_parameters()] or list(layer.state_dict())
    return bool(own) and all(any(names(p, f"{name}.{entry}") for p in patterns) for entry in own)


def _stays_in_evaluation(layer: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(layer, False)
