"""A tiny language model with a chat template, as a directory of transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_chat_model(directory: Path, seed: int) -> Path:
    """Write a model whose weights are drawn from a seed, and a tokenizer of characters; return the directory."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *map(chr, range(32, 127))])}
    characters = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>"))
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[3:],
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=4096,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    model.generation_config.do_sample = True  # without it, transformers' server ignores a request's temperature
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
