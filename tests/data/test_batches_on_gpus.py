"""Batches on their way to a pretended GPU."""

from __future__ import annotations

import sys
from typing import Any

PROGRAM = """
import torch
from torch.nn.utils.rnn import pack_sequence
from paceline.data.samples import to_device

gpu = torch.device("cuda", 1)
batch = {"packed": pack_sequence([torch.ones(2, 3), torch.ones(4, 3)], enforce_sorted=False), "label": torch.ones(2)}
moved = to_device(batch, gpu)
packed = moved["packed"]
assert {moved["label"].device, packed.data.device, packed.sorted_indices.device} == {gpu}
assert packed.batch_sizes.device.type == "cpu"  # torch refuses others
assert to_device(moved, torch.device("cuda", 0))["packed"].data.device.index == 0  # to a replica's
"""


def test_a_batch_moves_as_its_types_require(run_processes: Any, gpu_stand_in: Any) -> None:
    done = run_processes.finish(run_processes.start([sys.executable, "-c", PROGRAM], env=gpu_stand_in.env()))
    assert done.returncode == 0, done.stderr
