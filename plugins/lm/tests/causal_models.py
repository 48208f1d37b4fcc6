"""Language models of ``transformers``, built from small configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
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


@dataclass
class Causal(TransformersTask):
    kind: str = "llama"
    lr: float = 0.01

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=8, microbatches=4, epochs=1)

    def build_model(self) -> PreTrainedModel:
        if self.kind == "gpt2":
            return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2))
        if self.kind == "t5":
            config = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0)
            config.decoder_start_token_id = config.pad_token_id
            return T5ForConditionalGeneration(config)
        kinds = {
            "llama": (LlamaForCausalLM, LlamaConfig),
            "qwen2": (Qwen2ForCausalLM, Qwen2Config),
            "cohere": (CohereForCausalLM, CohereConfig),
        }
        model, settings = kinds[self.kind]
        return model(settings(**SIZES))

    def build_dataset(self, split: str) -> Any:
        if split != "train":
            return None
        return [{"input_ids": words, "labels": words} for words in torch.randint(3, 40, (24, 9))]
