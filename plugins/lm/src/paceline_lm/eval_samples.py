"""``--eval-samples FILE``: what a model says to some prompts, at each evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from paceline.core.errors import TaskError
from paceline.core.task import Task
from paceline_lm.transformers import call_in_evaluation, inside_of

_MOST_TOKENS = 64


def read_prompts(file: Path) -> list[str]:
    """Return the prompts of a file, one from each line.

    Raises:
        TaskError: it cannot be read, or has none.
    """
    try:
        prompts = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"--eval-samples {file}: {error}.") from error
    if not prompts:
        raise TaskError(f"--eval-samples {file} has no prompt. Write one in each line.")
    return prompts


def log_samples(task: Task, model: nn.Module, *, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> None:
    """Log the most probable continuation of each prompt; all ranks call this together, and none draws a random number.

    Args:
        model: to call, perhaps a wrapper around that of ``transformers``.
        prompts: messages of a user if the tokenizer has a chat template.
    """
    inside, texts = inside_of(task, model), []
    for prompt in prompts:
        text = prompt
        if tokenizer.chat_template:
            message = [{"role": "user", "content": prompt}]
            text = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
        begin = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
        words = torch.tensor([begin], device=inside.device)
        positions = getattr(inside.config, "max_position_embeddings", None) or words.shape[1] + _MOST_TOKENS
        for _ in range(_MOST_TOKENS):
            logits = call_in_evaluation(model, input_ids=words[:, -positions:], use_cache=False)
            words = torch.cat([words, logits[:, -1:].argmax(-1)], dim=1)
            if words[0, -1] == tokenizer.eos_token_id:
                break
        texts.append(f"{prompt} -> {tokenizer.decode(words[0, len(begin) :], skip_special_tokens=True)}")
    from paceline import log_text  # of the plug-in `trackers`, which only --eval-samples needs

    log_text("samples", "\n\n".join(texts))
