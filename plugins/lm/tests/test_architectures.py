"""Nine architectures of transformers under each strategy: the bits of one process, or a sentence that refuses it.

``pytest -m matrix -s plugins/lm/tests/test_architectures.py`` prints the table of docs/language-models.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from plugins.lm.tests.causal_models import KINDS, SIZES, Causal
from tests.processes import Processes
from torch.distributed.tensor.parallel import RowwiseParallel
from transformers import Qwen3Config, Qwen3ForCausalLM

import paceline
from paceline.parallel.pipeline.stages import find_blocks
from paceline.parallel.tp_autoplan import infer_tp_plan
from paceline.parallel.wrap_units import model_blocks

ROOT = Path(__file__).parents[3]
DRIVER = Path(__file__).with_name("matrix_driver.py")
TIED = ("qwen2", "gpt2", "cohere", "bert", "gemma2")
"""Kinds whose embedding is also the head."""
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp in small units": {"strategy": "fsdp", "fsdp_wrap": "500"},
    "pp": {"strategy": "pp"},
    "tp": {"strategy": "tp"},
}


def job(kind: str, run_dir: Path, options: Mapping[str, Any] = {}, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "options": {**options, "run_dir": str(run_dir)}, **more}


def train(
    processes: Processes, path: Path, number: int, jobs: Sequence[Mapping[str, Any]], code: int = 0
) -> list[dict[str, Any]]:
    """What each job ended with, on so many processes."""
    listed = path / "jobs.json"
    listed.write_text(json.dumps(jobs))
    env = {"PYTHONPATH": str(ROOT), "WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1"}
    env["MASTER_PORT"] = str(processes.free_port())
    ranks = [{**env, "RANK": str(rank)} for rank in range(number)] if number > 1 else [{"PYTHONPATH": str(ROOT)}]
    started = [processes.start([sys.executable, DRIVER, listed], env=each) for each in ranks]
    finished = [processes.finish(popen, timeout_s=280) for popen in started]
    assert [each.returncode for each in finished] == [code] * number, finished[-1].stderr
    return [json.loads(line) for line in finished[0].stdout.splitlines()]


def verdict(result: Mapping[str, Any], alone: Mapping[str, Any]) -> str:
    if "error" in result:
        return str(result["text"])
    return "equal" if result["model_sha256"] == alone["model_sha256"] else "differs"


def expected(strategy: str, kind: str) -> str:
    if strategy == "tp":
        return "differs"
    if strategy == "pp" and kind == "t5":
        return "--strategy pp cannot split a T5ForConditionalGeneration: it has 2 lists of layers"
    if strategy == "pp" and kind in TIED:
        return "Blocks that share a parameter cannot be separated"
    return "equal"


@pytest.mark.matrix
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_architecture_has_the_bits_of_one_process_or_is_refused(
    run_processes: Processes, tmp_path: Path, strategy: str
) -> None:
    alone = train(run_processes, tmp_path, 1, [job(kind, tmp_path / f"{kind}-1") for kind in KINDS])
    jobs = [job(kind, tmp_path / f"{kind}-2", STRATEGIES[strategy]) for kind in KINDS]
    found = {}
    for kind, one, two in zip(KINDS, alone, train(run_processes, tmp_path, 2, jobs), strict=True):
        found[kind] = verdict(two, one)
        print(f"{strategy:20} {kind:8} {found[kind]}")
    assert all(expected(strategy, kind) in text for kind, text in found.items()), found


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "block"), [("llama", "LlamaDecoderLayer"), pytest.param("gpt2", "GPT2Block", marks=pytest.mark.slow)]
)
def test_compiled_blocks_have_the_same_bits_under_fsdp(
    run_processes: Processes, tmp_path: Path, kind: str, block: str
) -> None:
    options, backend = {"compile": True}, "aot_eager"  # inductor takes a minute
    (one,) = train(run_processes, tmp_path, 1, [job(kind, tmp_path / "one", options, backend=backend)])
    sharded = {**options, "strategy": "fsdp", "fsdp_wrap": block}
    (two,) = train(run_processes, tmp_path, 2, [job(kind, tmp_path / "two", sharded, backend=backend)])
    assert verdict(two, one) == "equal"


@pytest.mark.matrix
def test_a_killed_run_continues_with_the_same_bits_on_more_processes(run_processes: Processes, tmp_path: Path) -> None:
    kinds, options = ("cohere", "t5", "mixtral"), {"strategy": "fsdp", "checkpoint_every": "1steps"}
    alone = train(run_processes, tmp_path, 1, [job(kind, tmp_path / f"{kind}-1") for kind in kinds])
    for kind in kinds:
        train(run_processes, tmp_path, 2, [job(kind, tmp_path / kind, options, kill_at=2)], code=-9)
    resumed = train(run_processes, tmp_path, 3, [job(kind, tmp_path / kind, options) for kind in kinds])
    assert [each["restarts"] for each in resumed] == [1, 1, 1]
    assert [verdict(*pair) for pair in zip(resumed, alone, strict=True)] == ["equal"] * 3


def test_two_processes_have_the_bits_of_one(run_processes: Processes, tmp_path: Path) -> None:
    kinds = {"cohere": STRATEGIES["fsdp in small units"], "phi": STRATEGIES["pp"]}
    alone = train(run_processes, tmp_path, 1, [job(kind, tmp_path / f"{kind}-1") for kind in kinds])
    jobs = [job(kind, tmp_path / f"{kind}-2", options) for kind, options in kinds.items()]
    both = train(run_processes, tmp_path, 2, jobs)
    assert [verdict(*pair) for pair in zip(both, alone, strict=True)] == ["equal", "equal"]


def test_tensors_are_split_by_the_model_s_own_plan() -> None:
    plan = infer_tp_plan(Causal(kind="llama").build_model(), 2)
    paired = {name for name, style in plan.items() if isinstance(style, RowwiseParallel)}
    assert paired == {f"model.layers.{n}.{part}" for n in range(2) for part in ("self_attn.o_proj", "mlp.down_proj")}
    with pytest.raises(paceline.ConfigError, match="4 processes cannot share the 2 heads"):
        infer_tp_plan(Causal(kind="llama").build_model(), 4)
    # Its norms of heads would have a part of their gradient on each rank, so attention is whole between its layers.
    norms_of_heads = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8))
    plan = infer_tp_plan(norms_of_heads, 2)
    assert {name for name, style in plan.items() if isinstance(style, RowwiseParallel)} == {
        f"model.layers.{n}.mlp.down_proj" for n in range(2)
    }


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["llama", "phi"])
def test_split_tensors_compute_the_model_within_rounding(run_processes: Processes, kind: str) -> None:
    task = f"{DRIVER.with_name('causal_models.py')}:Causal"
    command = ("verify", task, "--set", f"kind={kind}", "--strategies", "tp", "--worlds", "2", "--steps", "2")
    done = run_processes.paceline(*command, timeout_s=280)
    assert "Every strategy meets its guarantee." in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_cut_between_its_layers_or_refused(kind: str) -> None:
    task = Causal(kind=kind)
    model = task.build_model()
    assert len(model_blocks(model)) == (4 if kind == "t5" else 2)
    if kind == "t5":
        with pytest.raises(paceline.TaskError, match="2 lists of layers"):
            task.pipeline_blocks(model)
        return
    blocks = find_blocks(model, task.pipeline_blocks(model))
    assert len(blocks.blocks) == (1 if kind in TIED else 4)
    held = [name for block in blocks.blocks for name in block.holds]
    assert {name for name, _ in model.named_parameters()} <= set(held)
    assert len(held) == len(set(held))
