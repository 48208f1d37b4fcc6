"""``paceline plan``: the table, the recommendation, and that what it recommends works."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError, TaskError
from paceline_planning.command import plan
from paceline_planning.recommend import ClusterSpec, make_plan
from paceline_tasks.transformer import Transformer

TINY = {"layers": "2", "width": "32", "heads": "2", "context": "16", "held_out": "4"}


def machines(gpus: int, memory: int) -> ClusterSpec:
    return ClusterSpec(gpus=gpus, nodes=1, memory=memory, bandwidth=1e10, flops_per_s=1e14, device="cpu")


@pytest.mark.slow
def test_64_billion_parameters_on_a_laptop(run_processes: Any) -> None:
    sets = ("--set", "layers=80", "--set", "width=8192", "--set", "heads=64")
    done = run_processes.paceline("plan", "transformer", *sets, "--gpus", "64", "--gpu-memory", "80GiB", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["measurement"]["parameters"] == 80 * (12 * 8192**2 + 13 * 8192) + (2 * 256 + 128 + 2) * 8192
    fits = {
        (r["strategy"], r["reduction"], r["precision"], r["checkpoint_activations"]): r["fits"]
        for r in made["rows"]
        if not r["fsdp_mixed_precision"]
    }
    gathers = next(r for r in made["rows"] if r["fsdp_mixed_precision"] and r["checkpoint_activations"] == "none")
    assert not any(there for (strategy, *_), there in fits.items() if strategy in ("single", "ddp", "zero1"))
    assert fits["fsdp", "exact", "fp32", "none"]
    assert not fits["fsdp", "exact", "bf16", "none"], "autocast's copies of all weights"
    assert not fits["fsdp", "exact", "bf16", "block"], "they live until forward ends"
    assert gathers["fits"], "there are none"
    assert "--precision bf16" in made["command"]
    assert fits["pp", "exact", "fp32", "none"]
    assert "--microbatches 64" in made["command"]


def test_the_table_is_for_people(run_processes: Any) -> None:
    done = run_processes.paceline("plan", "fashion-mnist", "--gpus", "2", "--gpu-memory", "8GiB")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("strategy", "ddp", "fsdp"))]
    assert [row[-1] for row in rows[:3]] == ["fits", "yes", "yes"], "no column is cut"
    assert "fsdp is advised against: below 100 million parameters" in done.stdout
    assert done.stdout.splitlines()[-1] == "paceline train fashion-mnist --nproc 2"


@pytest.mark.parametrize("fits", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_recommended_command_works(run_processes: Any, tmp_path: Path, fits: bool) -> None:
    """Where the model fits ddp, and where it does not."""
    fields = {**TINY, "layers": "4", "width": "384"}
    task = Transformer(layers=4, width=384, heads=2, context=16, held_out=4)
    memory = 2**34
    if not fits:
        roomy = make_plan(task, "transformer", machines(2, memory), assignments=fields)
        memory = min(row.memory.total for row in roomy.rows if row.layout.family == "ddp")
    made = make_plan(task, "transformer", machines(2, memory), assignments=fields)
    assert made.command is not None
    assert ("--strategy" in made.command) is not fits
    words = shlex.split(made.command)[1:]
    done = run_processes.paceline(*words, "--max-steps", "2", "--threads", "1", "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr


@pytest.mark.integration
def test_nothing_fits() -> None:
    made = make_plan(Transformer(), "transformer", machines(2, 2**20), assignments={})
    assert made.command is None
    assert made.reasons[0].startswith("Nothing fits: ")


@pytest.mark.integration
def test_several_machines_meet_somewhere() -> None:
    two = ClusterSpec(gpus=4, nodes=2, memory=2**34, bandwidth=1e10, flops_per_s=1e14)
    made = make_plan(Transformer(**{n: int(v) for n, v in TINY.items()}), "transformer", two, assignments={})
    assert made.command == "paceline train transformer --nodes 2 --rdzv-endpoint HOST:29400 --nproc 2"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"gpu_memory": "80"},
            ConfigError,
            "--gpu-memory must be a size with its unit, such as 80GiB or 25GB, but is '80'",
        ),
        ({"bandwidth": "fast"}, ConfigError, "--bandwidth must be .* but is 'fast'"),
        ({"tflops": 0.0}, ConfigError, "--tflops must be positive"),
        ({"gpus": 0}, ConfigError, "--gpus must be at least 1"),
        ({"microbatches": 2}, ConfigError, "4 processes cannot share 2 micro-batches.*Use --microbatches 4"),
        (
            {"global_batch_size": 3},
            ConfigError,
            "--global-batch-size 3 is too small for 4 micro-batches.*4 or more",
        ),
        ({"set": ("depth=3",)}, TaskError, "no field 'depth'"),
        ({"set": ("width=10", "heads=4")}, TaskError, "must divide width"),
    ],
)
def test_bad_input_has_one_message(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan("transformer", **{"gpus": 4, "gpu_memory": "8GiB", **options})
