"""Low-rank adapters by peft: put around a model's layers, and merged into their weights again.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021 (https://arxiv.org/abs/2106.09685).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from paceline.core.errors import CheckpointError, ConfigError, join_names
from paceline.core.plugins import import_library
from paceline.runs.rank_log import silence_loggers
from paceline.torch_internals import PYTREE_LOGGER
from paceline_fine_tuning.options import ALL_LINEAR, Lora
from paceline_fine_tuning.quantization import QuantizedLinear, dequantize, hide_modules, require_bitsandbytes

_BASE, _A, _B = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"
NOISY = ("torchao", PYTREE_LOGGER)
"""Loggers of what peft imports, and is not used here."""


def add_adapters(module: nn.Module, lora: Lora) -> None:
    """Put adapters around linear layers of a model, in place, and freeze all other parameters.

    Args:
        module: the model; drawn from torch's generator is what an adapter's A begins with, and B is zero.
    """
    layers = target_layers(module, lora)
    _check_is_own(module, layers)
    transposed = [_is_conv1d(module.get_submodule(name)) for name in layers]
    shapes = [tuple(module.get_parameter(f"{name}.weight").shape) for name in layers]
    if any(transposed) and not (all(transposed) and any(rows != columns for rows, columns in shapes)):
        raise ConfigError(
            "--lora: with a Conv1D of transformers, all layers must be such, and one of them not square. Name others "
            "with target=."
        )
    require_peft()
    from peft import LoraConfig, inject_adapter_in_model

    if lora.quantize is not None:
        if any(transposed):
            raise ConfigError("--lora quantize=nf4 is for torch.nn.Linear, and not for the Conv1D of GPT-2.")
        require_bitsandbytes()
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        # Of a list, peft takes a name also for the end of others, whatever layers they are.
        target_modules="|".join(map(re.escape, layers)),
        bias="none",
        fan_in_fan_out=any(transposed),
    )
    try:
        with silence_loggers(*NOISY), hide_modules("bitsandbytes"):
            inject_adapter_in_model(config, module)
    except ValueError as error:
        raise ConfigError(f"--lora: peft refuses these layers: {error} Name others with target=.") from error
    for name in layers if lora.quantize is not None else ():
        adapter: Any = module.get_submodule(name)
        adapter.base_layer = QuantizedLinear(adapter.base_layer)


def target_layers(module: nn.Module, lora: Lora) -> list[str]:
    """Return the names of the layers that get an adapter."""
    linear = [name for name, layer in module.named_modules() if _is_linear(layer) or _is_conv1d(layer)]
    if lora.targets == (ALL_LINEAR,):
        found = linear[:-1]
        if not found:
            raise ConfigError(
                f"--lora: the model has {len(linear)} linear layers, and {ALL_LINEAR} is all but the last. "
                "Name them with target=. Only torch.nn.Linear and the Conv1D of GPT-2 can have adapters."
            )
        return found
    found = []
    for target in lora.targets:
        meant = [name for name in linear if fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")]
        if not meant:
            raise ConfigError(
                f"--lora target={target}: no linear layer of the model has such a name. Those there are: "
                f"{join_names(linear) or 'none'}."
            )
        found += [name for name in meant if name not in found]
    return found


def _is_linear(layer: nn.Module) -> bool:
    """Return whether a layer is nn.Linear or a model's own subclass; torch's attention does not call its own."""
    return isinstance(layer, nn.Linear) and (
        type(layer) is nn.Linear or not type(layer).__module__.startswith("torch.")
    )


def _is_conv1d(layer: nn.Module) -> bool:
    """Return whether a layer is transformers' linear layer whose weight is (in, out), as GPT-2 has it."""
    return (type(layer).__module__, type(layer).__name__) == ("transformers.pytorch_utils", "Conv1D")


def _check_is_own(module: nn.Module, layers: list[str]) -> None:
    """Refuse a layer whose weight is another's too: merged, its adapter would change both."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for sharing in names.values():
        for name in sharing:
            if len(sharing) > 1 and name.rpartition(".")[0] in layers:
                raise ConfigError(f"--lora: {join_names(sharing)} are one weight, so it cannot have an adapter.")


def require_peft() -> None:
    """Import peft."""
    # It and what it calls would import bitsandbytes for layers that are not used here, which takes seconds.
    with silence_loggers(*NOISY), hide_modules("bitsandbytes"):
        import_library("peft", "--lora", "lora")


def adapted_layers(state: Mapping[str, Any]) -> list[str]:
    """Return the names of the layers that have an adapter in the state of a trained model."""
    return [name.removesuffix(_A) for name in state if name.endswith(_A)]


def base_weights(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the task's own model as it was before adapters were trained around its layers.

    Quantized weights are dequantized.
    """
    plain = {name.replace(_BASE, "."): tensor for name, tensor in state.items() if not name.endswith((_A, _B))}
    for layer in adapted_layers(state):
        if f"{layer}.packed" in plain:
            a, b = matrices(state, layer)
            packed, scales = (plain.pop(f"{layer}.{part}") for part in ("packed", "scales"))
            plain[f"{layer}.weight"] = dequantize(packed, scales, (len(b), a.shape[1]))
    return plain


def matrices(state: Mapping[str, Any], layer: str) -> tuple[Any, Any]:
    """Return the matrices A and B of a layer's adapter."""
    if layer + _B not in state:
        raise CheckpointError(f"the adapter of {layer!r} is incomplete: {layer}{_B} is missing.")
    return state[layer + _A], state[layer + _B]


def matching_exactly(module: nn.Module, layers: list[str]) -> list[str] | str:
    """Return peft's ``target_modules`` that mean these layers alone: the ends of their names, else a pattern."""
    ends = sorted({layer.rpartition(".")[2] for layer in layers})
    meant = {name for name, _ in module.named_modules() if name.rpartition(".")[2] in ends}
    return ends if meant == set(layers) else "|".join(map(re.escape, layers))


def merge_adapters(state: Mapping[str, Any], lora: Lora) -> dict[str, Any]:
    """Merge adapters: return the state of an equivalent model without them.

    Returns:
        The input of ``load_state_dict`` of the task's own model.
    """
    plain, deltas = base_weights(state), {}
    for layer in adapted_layers(state):
        a, b = matrices(state, layer)
        if f"{layer}.weight" not in plain:
            raise CheckpointError(f"the adapter of {layer!r} is incomplete: its layer is missing.")
        deltas[f"{layer}.weight"] = b @ a * lora.scaling
    # Of square weights too, since add_adapters has seen that all layers are of one kind.
    transposed = any(plain[name].shape != delta.shape for name, delta in deltas.items())
    return plain | {name: plain[name] + (delta.T if transposed else delta) for name, delta in deltas.items()}
