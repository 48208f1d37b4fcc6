"""Data parallelism on three pretended GPUs, by NCCL and by gloo: the bits of three processes on CPUs."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.matrix

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "spare": {"computing": 2},
    "zero1": {"options": {"strategy": "zero1", "checkpoint_every": "4steps"}},
    "servers": {"options": {"strategy": "ps", "ps_servers": 2, "checkpoint_every": "4steps"}},
    "asynchronous-servers": {"options": {"strategy": "ps", "ps_servers": 2, "ps_mode": "async"}},
    "local-sgd": {"options": {"local_sgd_steps": 3, "microbatches": 3}},
}
DEVICES: dict[str, dict[str, str]] = {
    "cpu": {"device": "cpu"},
    "nccl": {"device": "cuda", "backend": "nccl"},
    "gloo": {"device": "cuda", "backend": "gloo"},
}


@pytest.fixture(scope="module")
def runs(start_trainings: Any, gpu_stand_in: Any) -> Any:
    jobs = {
        f"{name}-{device}": {
            "task": "Everything",
            **job,
            "options": {"epochs": 2, "eval_every": "never", **where, **job.get("options", {})},
        }
        for name, job in STRATEGIES.items()
        for device, where in DEVICES.items()
    }
    return start_trainings(jobs, ranks=3, env=gpu_stand_in.env(3))


@pytest.mark.parametrize("device", ["nccl", "gloo"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_messages_between_gpus_leave_the_bits(runs: Any, name: str, device: str) -> None:
    on_cpus, on_gpus = runs[f"{name}-cpu"], runs[f"{name}-{device}"]
    assert on_gpus.get("model_sha256") == on_cpus["model_sha256"], on_gpus
