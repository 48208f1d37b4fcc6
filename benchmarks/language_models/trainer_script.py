"""Training on packs by transformers' Trainer: ``torchrun trainer_script.py MODEL PACKS OUTPUT STEPS``."""

import sys

from datasets import load_dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

model, packs, output, steps = sys.argv[1:]
arguments = TrainingArguments(
    output_dir=output,
    per_device_train_batch_size=4,
    train_sampling_strategy="sequential",
    learning_rate=1e-3,
    max_grad_norm=0.0,
    max_steps=int(steps),
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
)
Trainer(
    AutoModelForCausalLM.from_pretrained(model),
    arguments,
    train_dataset=load_dataset("json", data_files=packs, split="train"),
    data_collator=default_data_collator,
).train()
