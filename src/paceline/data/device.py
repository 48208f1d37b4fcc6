"""Moving batches to the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a batch, through mappings, sequences and dataclasses; leave the rest as it is.

    Copies to a GPU go through pinned memory and are not waited for.
    """
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        if batch.device.type == "cpu" and device.type == "cuda" and not batch.is_pinned():
            batch = batch.pin_memory()
        return batch.to(device, non_blocking=True)
    if isinstance(batch, PackedSequence):
        return PackedSequence(*(to_device(part, device) for part in batch))
    if isinstance(batch, Mapping):
        return type(batch)({key: to_device(value, device) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple | list):
        values = [to_device(value, device) for value in batch]
        # Other tuples are named ones, which take their fields one by one.
        return type(batch)(values) if type(batch) in (tuple, list) else type(batch)(*values)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = (f.name for f in dataclasses.fields(batch) if f.init)
        return dataclasses.replace(batch, **{f: to_device(getattr(batch, f), device) for f in fields})
    return batch
