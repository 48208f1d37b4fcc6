"""Language models of ``transformers``, built from small configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import paceline
from paceline_lm.transformers import TransformersTask

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

_GPT2 = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
_BERT = {name: SIZES[name] for name in SIZES if name not in ("num_key_value_heads", "bos_token_id", "eos_token_id")}
_T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}

KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, SIZES),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {**SIZES, "tie_word_embeddings": True}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, _GPT2),
    "cohere": (CohereForCausalLM, CohereConfig, SIZES),
    "bert": (BertForMaskedLM, BertConfig, {**_BERT, "max_position_embeddings": 16}),
    "t5": (T5ForConditionalGeneration, T5Config, _T5),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {**SIZES, "num_local_experts": 4}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {**SIZES, "head_dim": 8, "sliding_window": 4}),
    "phi": (PhiForCausalLM, PhiConfig, {**SIZES, "resid_pdrop": 0.1}),
}


@dataclass
class Causal(TransformersTask):
    kind: str = "llama"
    lr: float = 0.01

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=8, microbatches=4, epochs=1)

    def build_model(self) -> PreTrainedModel:
        model, settings, more = KINDS[self.kind]
        config = settings(**more)
        if self.kind == "t5":
            config.decoder_start_token_id = config.pad_token_id
        return model(config)

    def build_dataset(self, split: str) -> Any:
        if split == "test":
            return None
        length = 24 if split == "train" else 4
        return [{"input_ids": words, "labels": words} for words in torch.randint(3, 40, (length, 9))]
