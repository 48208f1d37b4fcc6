"""Packed fine-tuning by TRL, as its documentation writes it: ``torchrun trl_script.py MODEL DATA OUTPUT STEPS``."""

import sys

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

model, data, output, steps = sys.argv[1:]
config = SFTConfig(
    output_dir=output,
    packing=True,
    packing_strategy="bfd_split",
    max_length=256,
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    max_grad_norm=0.0,
    max_steps=int(steps),
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    gradient_checkpointing=False,
    bf16=False,
    use_cpu=True,
)
dataset = load_dataset("json", data_files=data, split="train")
SFTTrainer(model, args=config, train_dataset=dataset).train()
