"""Directories of tiny models with their tokenizers, as ``save_pretrained`` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

TEXTS = [f"{who} {does} the {what}." for who in ("She", "He") for does in ("sees", "wants") for what in ["cup", "hat"]]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>")
    fast.chat_template = CHATML
    return fast


def build_tiny(kind: str, vocabulary: int) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(vocab_size=vocabulary, n_positions=64, n_embd=16, n_layer=2, n_head=2)
        return GPT2LMHeadModel(config)
    sizes: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 2,
        "tie_word_embeddings": kind == "qwen2",
    }
    return Qwen2ForCausalLM(Qwen2Config(**sizes)) if kind == "qwen2" else LlamaForCausalLM(LlamaConfig(**sizes))


def save_model(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Path:
    tokenizer = train_tokenizer()
    tokenizer.save_pretrained(folder)
    build_tiny(kind, len(tokenizer)).to(dtype).save_pretrained(folder)
    return folder


def write_lines(file: Path, records: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file
