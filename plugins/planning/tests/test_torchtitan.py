"""The memory of Llama 3.1 8B on 8 and 128 GPUs that torchtitan has published, predicted for its way of training."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import LlamaConfig, PreTrainedModel

from paceline.torch_internals import ATTENTION_FORWARDS
from paceline_lm.language_model import LanguageModel
from paceline_planning.measurement import measure
from paceline_planning.predict import RankLayout, predict_memory
from paceline_planning.recommend import HEADROOM

pytestmark = [pytest.mark.matrix, pytest.mark.slow]

# https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3:
# GiB that its allocator had reserved, with and without torch.compile, by GPUs.
PUBLISHED = {8: (82.4, 77.0), 128: (67.0, 62.0)}

_MM = torch.ops.aten.mm.default


def selective_contexts() -> Any:
    """Keep the results of attention and of every second product, as torchtitan's selective policy does."""
    products: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        products[context.is_recompute] += operation is _MM
        is_first = operation is _MM and products[context.is_recompute] % 2 == 1
        is_kept = is_first or operation in {attention.default for attention in ATTENTION_FORWARDS}
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


@dataclass
class Torchtitan(LanguageModel):
    """A model in bf16 between its blocks, with that policy, and a loss of all logits at once."""

    def build_model(self) -> PreTrainedModel:
        model = super().build_model()
        model.get_input_embeddings().register_forward_hook(
            lambda layer, words, rows: rows.bfloat16() if torch.is_autocast_enabled("cpu") else rows
        )
        for block in model.model.layers:
            forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=selective_contexts)
            block.forward = forward
        return model

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:  # type: ignore[override]
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        flat = logits.flatten(0, 1).float()
        del logits  # as torchtitan does
        return nn.functional.cross_entropy(flat, batch["labels"].flatten())


def test_llama_8b_is_within_a_tenth_of_torchtitan_s_table(tmp_path: Path) -> None:
    LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)
    m = measure(Torchtitan(model=str(tmp_path), from_scratch=True, context=8192), 2)
    used = {
        gpus: predict_memory(
            m,
            RankLayout(fsdp=gpus, mixed_precision=True),
            "allreduce",
            "bf16",
            num_microbatches=gpus,
            shared_memory=False,
        ).total
        for gpus in PUBLISHED
    }
    for gpus, published in PUBLISHED.items():
        reserved = used[gpus] / HEADROOM / 2**30
        print(f"{gpus} GPUs: {used[gpus] / 2**30:.1f} GiB in use, {reserved:.1f} reserved, {published} published")
        for gib in published:
            assert reserved == pytest.approx(gib, rel=0.1)
    assert used[8] < HEADROOM * 96 * 2**30
    assert used[8] > HEADROOM * 80e9, "refused on 80 GB"
