"""The model, the texts and the packs that all train on: ``python -m benchmarks.language_models.data DIRECTORY``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.language_models.sizes import BATCH_SIZE, CONTEXT, RANKS
from paceline.data.order import DeterministicSampler
from paceline.training.reproducibility import build_split
from paceline_lm import LanguageModel
from paceline_lm.packing import PackedDocuments

_PAGES = Path(__file__).parents[2] / "docs"
_VOCABULARY = 2048


def write(directory: Path) -> None:
    """Write a Llama of 1.3 million parameters, the paragraphs of Paceline's pages, and these packed in its order."""
    texts = [text for page in sorted(_PAGES.rglob("*.md")) for text in page.read_text().split("\n\n") if text.strip()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<pad>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder, file = directory / "model", directory / "texts.jsonl"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    packs = build_split(LanguageModel(model=str(folder), data=str(file), pack=CONTEXT), 0, "train")
    assert isinstance(packs, PackedDocuments)
    packs.set_epoch(0)
    order = DeterministicSampler(len(packs), RANKS * BATCH_SIZE, RANKS, 0, min_microbatch_size=1)
    with (directory / "packs.jsonl").open("w") as lines:
        for number in order.indices(0, 0, len(packs)):
            pack = packs[int(number)]
            lines.write(json.dumps({name: values.tolist() for name, values in pack.items()}) + "\n")
    counts = {"tokens": int(packs.documents.lengths.sum()), "packs": len(packs)}
    (directory / "counts.json").write_text(json.dumps(counts))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
