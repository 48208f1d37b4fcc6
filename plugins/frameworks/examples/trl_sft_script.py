"""Supervised fine-tuning by TRL, in a script that does not use Paceline.

    torchrun --standalone --nproc-per-node=2 trl_sft_script.py
    paceline launch --on spawn --nproc 2 --threads 1 -- trl_sft_script.py

Both start two processes, which share the batches and end with the same weights. Nothing is downloaded: the
model is a small one with random weights, its tokenizer has a token for each byte, and the text is made here.
Put ``from_pretrained`` and ``load_dataset`` in their places.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

END = "<|end|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and one for the end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, END])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def sums(number: int) -> Dataset:
    """Questions and answers."""
    pairs = [divmod(n * 37 % 400, 20) for n in range(number)]
    return Dataset.from_list([{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a, b in pairs])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args()

    set_seed(1)
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token_id
    size = {"n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 32, "vocab_size": len(tokenizer)}
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=end, eos_token_id=end, pad_token_id=end, **size))
    with tempfile.TemporaryDirectory() as directory:
        trainer = SFTTrainer(
            model=model,
            processing_class=tokenizer,
            train_dataset=sums(64),
            args=SFTConfig(
                output_dir=directory,
                num_train_epochs=options.epochs,
                learning_rate=options.lr,
                per_device_train_batch_size=4,
                max_length=32,
                bf16=False,
                use_cpu=not torch.cuda.is_available(),
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                seed=1,
            ),
        )
        trainer.train()

    weights = torch.nn.utils.parameters_to_vector(trainer.accelerator.unwrap_model(trainer.model).parameters())
    digest = hashlib.sha256(weights.detach().cpu().numpy().tobytes()).hexdigest()[:16]
    print(
        f"rank {trainer.accelerator.process_index} of {trainer.accelerator.num_processes}: "
        f"{trainer.state.global_step // options.epochs} batches an epoch, weights {digest}",
        flush=True,
    )
    # DistributedDataParallel keeps a reference to the group, whose threads occasionally abort the interpreter at its
    # end: free it first.
    accelerator = trainer.accelerator
    accelerator.free_memory(trainer.model_wrapped, trainer.optimizer, trainer.lr_scheduler)
    del trainer
    accelerator.end_training()


if __name__ == "__main__":
    main()
