"""What an error while a group forms means."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import distributed as dist

from paceline.core.errors import ConfigError, PeerLostError
from paceline.elastic import group_formation
from paceline.elastic.group_formation import open_process_group
from paceline.elastic.worker_channel import AgentClient, Assignment
from paceline.parallel.world import LocalDevice
from paceline.runs.rank_progress import ProgressTracker

PLACE = Assignment(
    generation=3, rank=1, world_size=2, local_rank=1, local_world_size=2, active=2, address="127.0.0.1", port=1
)
DUPLICATE = (
    "NCCL error in: ProcessGroupNCCL.cpp:94, invalid usage, NCCL version 2.28.9\nncclInvalidUsage: This usually "
    "reflects invalid usage of NCCL library.\nLast error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA "
    "device 1b000"
)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (dist.DistStoreError("wait timeout after 10000ms, keys: /3/cpu/0"), PeerLostError),
        (RuntimeError("Connection closed by peer"), PeerLostError),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), PeerLostError),
        (dist.DistBackendError(DUPLICATE), ConfigError),
        (dist.DistBackendError("NCCL error in: a.cpp:1, internal error"), dist.DistBackendError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error"), torch.AcceleratorError),
    ],
)
def test_only_a_peers_absence_forms_another_group(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[Exception]
) -> None:
    @contextmanager
    def fail(*arguments: Any, **options: Any) -> Iterator[None]:
        raise raised
        yield

    monkeypatch.setattr(group_formation, "form_group", fail)
    monkeypatch.setattr(group_formation, "_connect_to_store", lambda place, timeout_s: None)
    monkeypatch.setattr(group_formation, "_set_rank_variables", lambda place: None)
    member = SimpleNamespace(progress_tracker=ProgressTracker(), broken=lambda generation: False)
    member.when_broken = lambda generation, shutdown: None
    local = LocalDevice(device=torch.device("cpu"), backend="gloo")
    with pytest.raises(expected) as told, open_process_group(PLACE, cast(AgentClient, member), local=local):
        pass
    assert type(told.value) is expected
