"""Messages between two ranks arrive as they were sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu_stand_in.fixture import GpuStandIn
from tests.parallel.distributed.conftest import start_ranks

from paceline.parallel.point_to_point import describe_tensor, empty_tensor

RANKS = 4


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "gloo"), ("cuda", "nccl")])
def test_messages_arrive_at_the_ranks_and_in_the_tensors_that_wait_for_them(
    run_processes: Any, gpu_stand_in: GpuStandIn, tmp_path: Path, device: str, backend: str
) -> None:
    paths = [tmp_path / f"{rank}.json" for rank in range(RANKS)]
    env = gpu_stand_in.env(RANKS, DEVICE=device, BACKEND=backend)
    ranks = start_ranks(run_processes, RANKS, "point_to_point_worker.py", paths.__getitem__, **env)
    finished = [run_processes.finish(rank, timeout_s=120) for rank in ranks]
    assert [f.returncode for f in finished] == [0] * RANKS, finished
    for rank, path in enumerate(paths):
        report = json.loads(path.read_text())
        assert report["wrong"] == []
        assert report["all_to_all"] == [
            [peer + rank / 8 + number / 64] * (0 if number == 1 else 3 + number + peer)
            for peer in range(RANKS)
            if peer != rank
            for number in range(3)
        ]


def test_a_tensor_that_lies_on_the_cpu_of_the_sender_is_received_there() -> None:
    device = torch.device("meta")  # as a GPU is, another device
    assert empty_tensor(describe_tensor(torch.tensor(3.0)), device).device.type == "cpu"
    assert empty_tensor(["bfloat16", [2, 3], True], device).device.type == "meta"
