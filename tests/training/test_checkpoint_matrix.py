"""A checkpoint that was written under each strategy is continued under each other one."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.states import newest

pytestmark = pytest.mark.matrix

RANKS = {"single": 1, "dp": 1, "ddp": 2, "zero1": 2, "fsdp": 2, "pp": 2, "sequential": 2, "ps": 2, "tp": 2, "mesh": 4}
if find_spec("deepspeed") is not None:
    RANKS["zero3"] = 2
OPTIONS: dict[str, dict[str, Any]] = {
    "dp": {"dp_devices": 2},
    "sequential": {"strategy": "pp", "pp_schedule": "sequential"},
    "mesh": {"mesh": "pp=2,tp=2", "strategy": "auto"},
    "zero3": {"strategy": "deepspeed", "zero_stage": 3},
}
SPLIT = ("tp", "mesh")
EXACT = [name for name in RANKS if name not in (*SPLIT, "zero3")]
MOST = [name for name in RANKS if name not in ("dp", "sequential")]
"""Without the relatives of ``single`` and ``pp``."""


def job(strategy: str, path: Path) -> dict[str, Any]:
    options = {"max_steps": 3, "checkpoint_every": ["2steps"], "eval_every": "never", "run_dir": str(path)}
    return {"task": "Layered", "options": {**options, "strategy": strategy, **OPTIONS.get(strategy, {})}}


def trained(start_trainings: Any, jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What the jobs came to; each is called after its strategy, or ends in -STRATEGY."""
    groups = [
        start_trainings({n: j for n, j in jobs.items() if RANKS[n.rpartition("-")[2]] == ranks}, ranks=ranks)
        for ranks in sorted(set(RANKS.values()))
    ]
    return {name: result for group in groups for name, result in group.results().items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [MOST, pytest.param(list(RANKS), marks=pytest.mark.slow)], ids=["most", "all"])
def test_every_strategy_continues_every_others_run(start_trainings: Any, tmp_path: Path, names: list[str]) -> None:
    exact = [name for name in names if name in EXACT]
    written = trained(start_trainings, {name: job(name, tmp_path / name) for name in names})
    assert {written[name]["model_sha256"] for name in exact} == {written["single"]["model_sha256"]}

    def after_two_steps(name: str, other: str) -> Path:
        path = tmp_path / f"{name}-{other}"
        shutil.copytree(tmp_path / name, path)
        (path / "result.json").unlink()
        for checkpoint in (path / "checkpoints").glob("step-00000003-*"):
            shutil.rmtree(checkpoint)
        return path

    continued = trained(
        start_trainings,
        {f"{one}-{other}": job(other, after_two_steps(one, other)) for one in names for other in names},
    )
    errors = {name: result["message"] for name, result in continued.items() if "error" in result}
    assert errors == {}
    assert {result["restarts"] for result in continued.values()} == {1}
    assert continued["tp-ddp"]["model_sha256"] == continued["mesh-ddp"]["model_sha256"]
    for one in names:
        # The third step has the same bits, whoever makes it: so they began with the same ones.
        expected = written["single"] if one in exact else continued[f"{one}-ddp"]
        assert {continued[f"{one}-{other}"]["model_sha256"] for other in exact} == {expected["model_sha256"]}
        assert len({continued[f"{one}-{other}"]["model_sha256"] for other in SPLIT}) == 1
        reference = newest(tmp_path / "single")["model"]
        for other in set(names) - set(exact):
            model = newest(tmp_path / f"{one}-{other}")["model"]
            for name, tensor in reference.items():
                torch.testing.assert_close(model[name], tensor, rtol=1e-4, atol=1e-5)
