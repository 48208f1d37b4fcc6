"""Language models of transformers, measured as they train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from plugins.planning.tests.tasks import Measured
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
)

from paceline_lm.transformers import TransformersTask

KINDS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "gpt2": (GPT2LMHeadModel, GPT2Config),
    "cohere": (CohereForCausalLM, CohereConfig),
}


@dataclass
class MeasuredLanguageModel(Measured, TransformersTask):
    """12 to 18 million parameters in six blocks, with AdamW's state; Qwen2, GPT-2 and Cohere tie their weights."""

    kind: str = "llama"
    layers: int = 6
    width: int = 384
    vocabulary: int = 4096

    def build_model(self) -> PreTrainedModel:
        self.note_imports()
        model, settings = KINDS[self.kind]
        config = settings(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=3 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=self.kind != "llama",
        )
        if self.kind == "gpt2":
            config = settings(
                vocab_size=self.vocabulary, n_embd=self.width, n_layer=self.layers, n_head=4, n_positions=128
            )
        built: PreTrainedModel = model(config)
        return built

    def build_dataset(self, split: str) -> Any:
        self.note_imports()
        if split != "train":
            return None
        words = torch.randint(8, (64, 128), generator=torch.Generator().manual_seed(0))
        return [{"input_ids": row, "labels": row} for row in words]


@dataclass
class MeasuredSmallLanguageModel(MeasuredLanguageModel):
    """A model of no size: what is left is what any process takes."""

    layers: int = 2
    width: int = 16
    vocabulary: int = 16
