"""Training under the tensor parallelism of transformers: ``torchrun tp_script.py MODEL TOKENS REPORT STEPS``."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.language_models.sizes import BATCH_SIZE, CONTEXT

folder, tokens, report, steps = sys.argv[1:]
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
samples = torch.from_numpy(np.fromfile(tokens, "<u2").astype(np.int64)).reshape(-1, BATCH_SIZE, CONTEXT)
seconds, losses = [], []
for batch in samples[: int(steps)]:
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    seconds.append(time.perf_counter())
if torch.distributed.get_rank() == 0:
    Path(report).write_text(json.dumps({"at": seconds, "losses": losses}))
torch.distributed.destroy_process_group()
