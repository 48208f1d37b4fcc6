"""``paceline export --format peft``: the adapters of ``--lora`` as a directory that peft loads onto the base model."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path

import safetensors.torch
from torch import nn

from paceline.core.errors import ExportError
from paceline.export.formats import Quantization
from paceline.runs.rank_log import silence_loggers_and_warnings
from paceline.training.loaded_model import evaluated_weights, read_checkpoint
from paceline_fine_tuning.adapters import (
    NOISY,
    adapted_layers,
    base_weights,
    matching_exactly,
    matrices,
    require_peft,
)
from paceline_fine_tuning.options import FineTuningOptions
from paceline_fine_tuning.quantization import hide_modules
from paceline_lm.directories import ModelToWrite, export_directory

_CAUSAL = ("ForCausalLM", "LMHeadModel")


def write_peft(trained: ModelToWrite, directory: Path, quantization: Quantization | None) -> nn.Module:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors``.

    Returns:
        The task's model as it was before the training, with the adapters that peft loads from the directory.

    Raises:
        ExportError: the run has no adapters, or the weights should be quantized.
    """
    lora = trained.config[FineTuningOptions].lora
    if lora is None:
        raise ExportError("--format peft is for runs with --lora; this one trained the model's own weights.")
    if quantization is not None:
        raise ExportError("--format peft writes the adapters as they were trained. Leave --quantize out.")
    require_peft()
    with silence_loggers_and_warnings(*NOISY):
        from peft import LoraConfig, PeftModel, TaskType

        state = evaluated_weights(read_checkpoint(trained.directory, trained.path).state)
        base = deepcopy(trained.module)
        base.load_state_dict(base_weights(state))
        layers = adapted_layers(state)
        LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=matching_exactly(base, layers),
            bias="none",
            base_model_name_or_path=getattr(base, "name_or_path", None) or None,
            task_type=TaskType.CAUSAL_LM if type(base).__name__.endswith(_CAUSAL) else None,
            inference_mode=True,
        ).save_pretrained(str(directory))
        adapters = {
            f"base_model.model.{layer}.lora_{letter}.weight": tensor.contiguous()
            for layer in layers
            for letter, tensor in zip("AB", matrices(state, layer), strict=True)
        }
        safetensors.torch.save_file(adapters, directory / "adapter_model.safetensors", {"format": "pt"})
        with hide_modules("bitsandbytes"):
            loaded: nn.Module = PeftModel.from_pretrained(base, str(directory))
    return loaded


export_peft = partial(export_directory, "peft", write_peft)
