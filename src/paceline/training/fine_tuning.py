"""Fine-tuning: the model that is trained, made of the task's by weights from elsewhere, LoRA adapters and freezing."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from paceline.core.config import RunConfig
from paceline.core.errors import CheckpointError, ConfigError, join_names
from paceline.core.fine_tuning_config import ALL_LINEAR, Lora
from paceline.runs.checkpoint_state import rename_entries
from paceline.runs.rank_log import silence_loggers
from paceline.torch_internals import PYTREE_LOGGER, NormBase
from paceline.training.optim import matches, require_match
from paceline.training.reproducibility import seed_adapters

# --- Low-rank adapters by peft: put around a model's layers, and merged into their weights again ---
#
# Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021 (https://arxiv.org/abs/2106.09685).


_BASE, _A, _B = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"
_NOISY = ("torchao", PYTREE_LOGGER)  # peft imports it, and it is not used here


def add_adapters(module: nn.Module, lora: Lora) -> None:
    """Put adapters around linear layers of a model, in place, and freeze all other parameters.

    Args:
        module: the model; drawn from torch's generator is what an adapter's A begins with, and B is zero.
        lora: which layers, and the adapters' size.

    Raises:
        ConfigError: peft is not installed or refuses a layer, or no linear layer is meant.
    """
    layers = target_layers(module, lora)
    try:
        with silence_loggers(*_NOISY):
            from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            f"--lora needs peft, which cannot be imported ({error}). Install it: pip install 'paceline[lora]'"
        ) from error
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        # Of a list, peft takes a name also for the end of others, whatever layers they are.
        target_modules="|".join(map(re.escape, layers)),
        bias="none",
    )
    try:
        with silence_loggers(*_NOISY):
            inject_adapter_in_model(config, module)
    except ValueError as error:
        raise ConfigError(f"--lora: peft refuses these layers: {error} Name others with target=.") from error


def target_layers(module: nn.Module, lora: Lora) -> list[str]:
    """Return the names of the layers that get an adapter.

    Raises:
        ConfigError: a target names no linear layer.
    """
    linear = [name for name, layer in module.named_modules() if type(layer) is nn.Linear]
    if lora.targets == (ALL_LINEAR,):
        found = linear[:-1]
        if not found:
            raise ConfigError(
                f"--lora: the model has {len(linear)} linear layers, and {ALL_LINEAR} is all but the last. "
                "Name them with target=."
            )
        return found
    found = []
    for target in lora.targets:
        meant = [name for name in linear if fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")]
        if not meant:
            raise ConfigError(
                f"--lora target={target}: no torch.nn.Linear of the model has such a name. Those there are: "
                f"{join_names(linear) or 'none'}."
            )
        found += [name for name in meant if name not in found]
    return found


def merge_adapters(state: Mapping[str, Any], lora: Lora) -> dict[str, Any]:
    """Merge adapters: return the state of an equivalent model without them.

    Args:
        state: of a model that :func:`add_adapters` has changed.

    Returns:
        The input of ``load_state_dict`` of the task's own model.

    Raises:
        CheckpointError: an adapter has only one of its two matrices.
    """
    plain = {name.replace(_BASE, "."): tensor for name, tensor in state.items() if not name.endswith((_A, _B))}
    for name, a in state.items():
        if not name.endswith(_A):
            continue
        layer = name.removesuffix(_A)
        if layer + _B not in state or f"{layer}.weight" not in plain:
            raise CheckpointError(f"the adapter of {layer!r} is incomplete: {layer}{_B} or its layer is missing.")
        plain[f"{layer}.weight"] = plain[f"{layer}.weight"] + state[layer + _B] @ a * lora.scaling
    return plain


_AVERAGED = "module."  # what AveragedModel puts before the names


def evaluated_weights(state: Mapping[str, Any], lora: Lora | None) -> dict[str, Any]:
    """Return the evaluated weights of a checkpoint: the moving average, if there is one.

    Args:
        lora: the adapters that its run was trained with.

    Returns:
        The input of ``load_state_dict`` of the task's own model; adapters are merged.

    Raises:
        CheckpointError: there is no model in it, or one with adapters that ``lora`` does not know of.
    """
    if "model" not in state:
        raise CheckpointError("the checkpoint holds no model.")
    entries = state["model"]
    if "ema" in state:
        entries = {
            name.removeprefix(_AVERAGED): value for name, value in state["ema"].items() if name.startswith(_AVERAGED)
        }
    if lora is not None:
        return merge_adapters(entries, lora)
    if any(".lora_A." in name for name in entries):
        raise CheckpointError(
            "the checkpoint has adapters, and what their product is scaled by stands in the run.toml of its "
            "run, which is not there. Name the run instead."
        )
    return dict(entries)


# --- The initial model: weights of another run, adapters, and the choice of trained parameters ---
#
# Paceline reads the weights once, when the run is created, and keeps them in its directory: the parent may be deleted,
# and every start has the same bits. All other changes to the model are a function of the options, made whenever the
# model is built.


def initialise(module: nn.Module, config: RunConfig, weights: Mapping[str, torch.Tensor] | None = None) -> None:
    """Change a model, as the task built it, into the one that is trained.

    Args:
        module: on the CPU, before it is laid out on the ranks.
        weights: those of another run, by name; None where the state that is trained comes later.

    Raises:
        ConfigError: the weights do not fit, an option matches nothing, or nothing is left to train.
    """
    fresh = reinitialized_parameters(module, config)
    if weights is not None:
        assert config.fine_tuning.init_from is not None
        _load(module, weights, config.fine_tuning.init_from, fresh, config.fine_tuning.reset)
    if config.fine_tuning.lora is not None:
        seed_adapters(config.training.seed)
        add_adapters(module, config.fine_tuning.lora)
    if config.fine_tuning.freeze:
        freeze(module, config.fine_tuning.freeze)


def reinitialized_parameters(module: nn.Module, config: RunConfig) -> set[str]:
    """Return the entries of the model's state that keep their values from the task.

    Raises:
        ConfigError: there is no such layer, or the last one shares its weights.
    """
    state = module.state_dict()
    fresh = {name for name in state for pattern in config.fine_tuning.reset if matches(pattern, name)}
    if config.fine_tuning.reset_head:
        head = last_layer(module)
        fresh |= {name for name in state if name.rpartition(".")[0] == head}
        shared = [
            name
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if name not in fresh and any(parameter is module.get_parameter(own) for own in fresh & _own(module))
        ]
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


def _own(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters(remove_duplicate=False)}


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
    """Describe the parameters that do not fit, by name, and the remedy."""
    shapes = (f"{n} is {tuple(weights[n].shape)} there and {tuple(state[n].shape)} here" for n in reshaped)
    lines = [f"--init-from {source}: the weights do not fit the task's model."]
    lines += [f"  other shapes: {join_names(shapes)}"] if reshaped else []
    lines += [f"  missing there: {join_names(missing)}"] if missing else []
    lines += [f"  not in the model: {join_names(unexpected)}"] if unexpected else []
    head = last_layer(module)
    wrong = [*missing, *unexpected, *reshaped]
    if all(name.rpartition(".")[0] == head for name in wrong):
        lines.append(f"Use --reset-head to reinitialize the last layer ({head}).")
    else:
        layers = dict.fromkeys(name.rpartition(".")[0] or name for name in wrong)
        options = " ".join(f"--reset {layer}" for layer in list(layers)[:4])
        more = " and so on" if len(layers) > 4 else ""
        lines.append(f"Reinitialize them with {options}{more}, or build the earlier model.")
    return "\n".join(lines)


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze parameters, and the statistics of batch norms whose parameters are all frozen.

    Such a batch norm stays in evaluation mode, as everywhere in the field: it normalises with the statistics
    that it has (https://keras.io/guides/transfer_learning).

    Raises:
        ConfigError: a pattern matches nothing, or nothing is left to train.
    """
    for pattern in patterns:
        require_match("--freeze", pattern, module, others=module.state_dict())
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if any(matches(pattern, name) for pattern in patterns):
            parameter.requires_grad_(False)
    for name, layer in module.named_modules():
        if isinstance(layer, NormBase) and _keeps_statistics(name, layer, patterns):
            # On the module itself: Module.train() of what holds it asks each part.
            object.__setattr__(layer, "train", types.MethodType(_stays_in_evaluation, layer))
            layer.train()
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(f"--freeze {' --freeze '.join(patterns)} leaves nothing to train.")


def _keeps_statistics(name: str, layer: nn.Module, patterns: Sequence[str]) -> bool:
    """Return whether all parameters of a batch norm are frozen, or it has none and its statistics are named."""
    own = [entry for entry, _ in layer.named_parameters()] or list(layer.state_dict())
    return bool(own) and all(any(matches(p, f"{name}.{entry}") for p in patterns) for entry in own)


def _stays_in_evaluation(layer: nn.Module, mode: bool = True) -> nn.Module:
    return nn.Module.train(layer, False)
