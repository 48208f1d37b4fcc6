"""The rates of a training in units of the hardware: FLOPs, and their share of the devices' peak (MFU)."""

from __future__ import annotations

import time
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from paceline.torch_internals import FakeTensorMode

_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""FLOP/s of bf16 or fp16 matrix products without sparsity, by a part of the GPU's name; from data sheets."""

_SIZE, _PRODUCTS = 512, 8


def count_flops(config: PreTrainedConfig, length: int) -> float:
    """Return the operations of a token, forward and backward, in a sequence of some length.

    Counted are matrix products of a model that is built without values. Attention counts in full, as in the PaLM paper
    (https://arxiv.org/abs/2204.02311, appendix B), and recomputed activations do not.
    """
    counter = FlopCounterMode(display=False)
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", trust_remote_code=False)
        tokens = torch.zeros(1, length, dtype=torch.int64)
        with counter:
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return float(counter.get_total_flops()) / length


@cache
def find_peak(device: torch.device) -> float | None:
    """Return the FLOP/s of a GPU, from its data sheet, if known; or of a CPU, measured with this rank's threads."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return next((peak for part, peak in _PEAKS.items() if part in name), None)
    if device.type != "cpu":
        return None
    left, shortest = torch.ones(_SIZE, _SIZE), float("inf")
    for _ in range(_PRODUCTS):
        began = time.perf_counter()
        left @ left
        shortest = min(shortest, time.perf_counter() - began)
    return 2 * _SIZE**3 / shortest
