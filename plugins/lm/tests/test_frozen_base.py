"""Checkpoints of adapters: what is trained, and the base's address and digest."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins.lm.tests.directories import TEXTS, build_tiny, save_model, write_lines
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

import paceline
from paceline.export.export import ExportRequest
from paceline.runs.checkpoint_selection import select_checkpoint
from paceline.runs.checkpointer import load
from paceline.runs.directory import RunDirectory
from paceline_fine_tuning.adapters import add_adapters
from paceline_fine_tuning.fork import fork_run
from paceline_fine_tuning.options import Lora
from paceline_lm import LanguageModel
from paceline_lm.hf_directory import export_hf
from paceline_lm.peft_directory import export_peft
from paceline_lm.throughput import count_flops
from paceline_pages.recorded_metrics import check_run

pytestmark = pytest.mark.integration  # accelerate, which transformers imports, starts processes

WORDS = torch.arange(3, 12)[None]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with tied weights, and texts."""
    root = tmp_path_factory.mktemp("files")
    save_model(root / "model", "qwen2")
    write_lines(root / "texts.jsonl", [{"text": text} for text in TEXTS * 4])
    return root


def fit(files: Path, run: Path, model: Path | None = None, **options: Any) -> paceline.Result:
    task = LanguageModel(model=str(model or files / "model"), data=str(files / "texts.jsonl"), pack=32, lr=0.05)
    if not run.exists():
        options = {"max_steps": 4, "threads": 1, "global_batch_size": 2, **options}
    return paceline.fit(task, run_dir=run, quiet=True, num_workers=0, **options)


@pytest.fixture(scope="module", params=["rank=2", pytest.param("rank=2,quantize=nf4", marks=pytest.mark.slow)])
def adapted(request: pytest.FixtureRequest, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a moving average and a best model."""
    run = tmp_path_factory.mktemp("runs") / "run"
    more = {"val_fraction": 0.25, "eval_every": "1steps", "checkpoint_every": "1steps", "keep_checkpoints": 9}
    fit(files, run, ema=0.5, lora=request.param, **more)
    return run


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=WORDS).logits
    return found


def test_a_checkpoint_holds_the_adapters_and_names_the_base(adapted: Path, files: Path) -> None:
    base = tomllib.loads((adapted / "run.toml").read_text())["base"]
    assert base["address"] == str(files / "model")
    path = select_checkpoint(RunDirectory(adapted).checkpoints, "last")
    state = load(path).state
    assert state["base"] == base
    for part in ("model", "ema"):
        assert {name.rpartition(".lora_")[1] for name in state[part] if name != "n_averaged"} == {".lora_"}
    assert sum(file.stat().st_size for file in path.iterdir()) < 2**17


@pytest.mark.slow
def test_what_reads_a_run_has_the_whole_model(adapted: Path, files: Path, tmp_path: Path) -> None:
    trained = paceline.load(adapted, "last")
    base = AutoModelForCausalLM.from_pretrained(files / "model", dtype=torch.float32)
    assert not torch.equal(logits(trained), logits(base))
    assert all(finding.holds for finding in check_run(RunDirectory(adapted), lambda *_: None).findings)
    exported = export_hf(ExportRequest(run=adapted, checkpoint="last"), tmp_path / "hf")
    assert exported.difference.largest == 0
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")), logits(trained))
    assert export_peft(ExportRequest(run=adapted), tmp_path / "peft").difference.largest < 1e-6
    fit(files, tmp_path / "child", init_from=f"{adapted}@last", lora="rank=3", max_steps=1)
    assert json.loads((tmp_path / "child" / "result.json").read_text())["drift"]["relative_l2"] > 0
    whole = load(select_checkpoint(RunDirectory(tmp_path / "child").checkpoints, "last")).state
    assert "base" not in whole
    assert "model.embed_tokens.weight" in whole["model"]


def test_a_fork_continues_on_the_base_where_it_is_now(adapted: Path, files: Path, tmp_path: Path) -> None:
    shutil.copytree(files / "model", tmp_path / "moved")
    fork_run(RunDirectory(adapted), RunDirectory(tmp_path / "fork"), {"model": str(tmp_path / "moved")}, step=2)
    result = fit(files, tmp_path / "fork", tmp_path / "moved")
    before = json.loads((adapted / "result.json").read_text())
    assert (result.steps, result.model_sha256) == (4, before["model_sha256"])


def test_another_base_is_refused_and_a_missing_one_named(files: Path, tmp_path: Path) -> None:
    shutil.copytree(files, tmp_path / "own")
    fit(tmp_path / "own", tmp_path / "run", lora="rank=2", max_steps=1)
    model = tmp_path / "own" / "model"
    model.rename(tmp_path / "away")
    recorded = tomllib.loads((tmp_path / "run" / "run.toml").read_text())["base"]["sha256"]
    with pytest.raises(paceline.TaskError, match=f"frozen parameters are those of .*, SHA-256 {recorded}. Restore it"):
        paceline.load(tmp_path / "run")
    save_model(model, "qwen2", torch.float32)
    message = rf"not those of the run: it began with .*, SHA-256 {recorded}, and .* Restore the files, or start a new"
    with pytest.raises(paceline.TaskError, match=message):
        paceline.load(tmp_path / "run")
    fork_run(RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "fork"), {}, options={"max_steps": 2})
    with pytest.raises(paceline.TaskError, match=message):
        fit(tmp_path / "own", tmp_path / "fork")


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_flops_are_those_of_what_is_trained(kind: str) -> None:
    adapted, frozen, whole = (build_tiny(kind, 320) for _ in range(3))
    add_adapters(adapted, Lora(rank=2))
    for parameter in list(frozen.parameters())[:-8]:
        parameter.requires_grad_(False)
    words = torch.zeros(1, 16, dtype=torch.int64)
    counts = []
    for model in (adapted, frozen, whole):
        model.set_attn_implementation("eager")
        with FlopCounterMode(display=False) as counter:
            model(input_ids=words, labels=words, use_cache=False).loss.backward()
        counts.append(count_flops(model.config, 16, model) * 16)
        assert counts[-1] == counter.get_total_flops()
    assert max(counts[:2]) < counts[2]
