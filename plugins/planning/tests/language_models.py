"""Language models of transformers, measured as they train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from plugins.planning.tests.tasks import Measured
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from paceline_lm.transformers import TransformersTask


@dataclass
class MeasuredLanguageModel(Measured, TransformersTask):
    """12 to 18 million parameters in six blocks, with AdamW's state; Qwen2, GPT-2 and Cohere tie their weights."""

    kind: str = "llama"
    layers: int = 6
    width: int = 384
    vocabulary: int = 4096

    def build_model(self) -> PreTrainedModel:
        self.note_imports()
        config = AutoConfig.for_model(
            self.kind,
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=3 * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=self.kind != "llama",
        )
        built: PreTrainedModel = AutoModelForCausalLM.from_config(config)
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
