"""The rates of a training in units of the hardware: FLOPs, and their share of the devices' peak (MFU)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from paceline.core.task import RankInfo
from paceline.runs.monitor import Monitor
from paceline.torch_internals import FakeTensor, FakeTensorMode

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

_ADAPTER = ".lora_A.default"
"""The end of the name of an adapter's first matrix, of peft."""


def count_flops(config: PreTrainedConfig, length: int, trained: nn.Module) -> float:
    """Return the operations of a token, forward and backward, in a sequence of some length.

    Counted are matrix products of a model that is built without values. Attention counts in full, as in the PaLM paper
    (https://arxiv.org/abs/2204.02311, appendix B), and recomputed activations do not. Frozen weights have no gradients,
    but those of their inputs are computed as far as a trained weight needs them.

    Args:
        trained: the model, which may be laid out on ranks; of it are the adapters, and which weights are trained.
    """
    names = {name for name, parameter in trained.named_parameters() if parameter.requires_grad}
    counter = FlopCounterMode(display=False)
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", trust_remote_code=False)
        own, layers = dict(model.named_parameters()), dict(model.named_modules())
        downs = {name.removesuffix(_ADAPTER): m for name, m in trained.named_modules() if name.endswith(_ADAPTER)}
        is_other = not downs and names.isdisjoint(own)  # a model of a task of one's own
        for name, parameter in own.items():
            parameter.requires_grad_(is_other or name in names)
        for name in downs.keys() & layers.keys():
            model.set_submodule(name, _Adapted(layers[name], downs[name]))
        tokens = torch.zeros(1, length, dtype=torch.int64)
        with counter:
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return float(counter.get_total_flops()) / length


class _Adapted(nn.Module):
    """A layer with the adapter of another one."""

    def __init__(self, layer: nn.Module, down: Any) -> None:
        super().__init__()
        self._layer = layer
        self._down = nn.Linear(down.in_features, down.out_features, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self._layer(inputs)
        up = torch.zeros(outputs.shape[-1], self._down.out_features, requires_grad=True)
        return outputs + nn.functional.linear(self._down(inputs), up)


Counts = list[tuple[torch.Tensor, int, int]]
"""Of batches: the tokens without padding, those with it, and the samples."""


def count_tokens(batch: Mapping[str, Any]) -> Counts:
    """Count the tokens of a batch of documents, or packs of them; no values of tensors are read yet."""
    inside, words = batch.get("num_tokens", batch.get("attention_mask")), batch.get("input_ids")
    if isinstance(inside, torch.Tensor) and isinstance(words, torch.Tensor) and not isinstance(words, FakeTensor):
        return [(inside.sum(), words.numel(), len(words))]
    return []


class Rates:
    """What is logged of a training's tokens: their rate, FLOPs, the share of the peak, and of padding.

    Args:
        mean_tokens: of a sample without padding, until some are counted.
        flops: returns the operations of a token.
        counts: of this rank; they are taken out.
    """

    def __init__(self, mean_tokens: float, flops: Callable[[], float], counts: Counts) -> None:
        self._mean_tokens = mean_tokens
        self._flops = flops
        self._counts = counts
        self._group: RankInfo | None = None

    def attach(self, group: RankInfo) -> None:
        self._group = group
        self._log(self._mean_tokens)

    def measure(self) -> Mapping[str, float]:
        """Return the share of padding since the last record; all ranks call this together."""
        assert self._group is not None
        insides, *others = zip(*self._counts, strict=True) if self._counts else ((), (), ())
        own = (int(torch.stack(insides).sum()) if insides else 0, *map(sum, others))
        self._counts.clear()
        tokens, places, samples = map(sum, zip(*self._group.gather(own), strict=True))
        if not places:
            return {}
        self._log(tokens / samples)
        return {"padding": round(1 - tokens / places, 5)}

    def _log(self, tokens: float) -> None:
        group, monitor = self._group, Monitor.current
        if group is None or group.rank != 0 or monitor is None:
            return
        flops = tokens * self._flops()
        monitor.per_sample |= {"tokens_per_s": tokens, "tflops_per_s": flops / 1e12}
        if peak := find_peak(group.device):
            monitor.per_sample["mfu"] = flops / (peak * group.world_size)


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
