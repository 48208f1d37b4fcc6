"""A small GPT-2 that learns a few proverbs by heart: a transformers model with its collator, as a task.

    paceline train examples/transformers_text.py:Proverbs
    paceline train examples/transformers_text.py:Proverbs --nproc 2

Nothing is downloaded: the model is built from a config, and the tokenizer from the text. Both commands end
with the same weights, bit for bit, if each process has the same number of threads (--threads 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import paceline
from paceline_lm import TransformersTask

TEXT = """
A bird in the hand is worth two in the bush.
A chain is only as strong as its weakest link.
Actions speak louder than words.
All good things come to those who wait.
Better late than never.
Do not count your chickens before they are hatched.
Every cloud has a silver lining.
Fortune favours the bold.
Good things come in small packages.
Haste makes waste.
If it is not broken, do not fix it.
Let sleeping dogs lie.
Look before you leap.
Make hay while the sun shines.
Many hands make light work.
No news is good news.
One good turn deserves another.
Practice makes perfect.
Rome was not built in a day.
Slow and steady wins the race.
Still waters run deep.
The early bird catches the worm.
Too many cooks spoil the broth.
Where there is a will, there is a way.
""".strip().splitlines()


def characters() -> PreTrainedTokenizerFast:
    """A token for each character of the text."""
    special = ["<pad>", "<end>"]
    vocabulary = {token: i for i, token in enumerate([*special, *sorted({c for line in TEXT for c in line})])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", model_max_length=64
    )


@dataclass
class Proverbs(TransformersTask):
    """Lines of different lengths: a step is the mean over their tokens, not over lines."""

    lr: float = 0.005
    width: int = 32

    defaults: ClassVar[paceline.Defaults] = paceline.Defaults(global_batch_size=8, microbatches=4, epochs=10)

    def build_model(self) -> PreTrainedModel:
        tokenizer = characters()
        config = GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=64,
            n_embd=self.width,
            n_layer=2,
            n_head=2,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        return GPT2LMHeadModel(config)

    def build_dataset(self, split: str) -> list[dict[str, list[int]]] | None:
        if split == "test":
            return None
        tokenizer = characters()
        lines = TEXT if split == "train" else TEXT[::5]  # lines that it has seen
        return [{"input_ids": [*tokenizer(line)["input_ids"], tokenizer.eos_token_id]} for line in lines]

    def build_collator(self) -> Callable[[list[Any]], Mapping[str, torch.Tensor]]:
        collator: Callable[[list[Any]], Mapping[str, torch.Tensor]]
        collator = DataCollatorForLanguageModeling(characters(), mlm=False)
        return collator


if __name__ == "__main__":
    print(paceline.fit(Proverbs()))
