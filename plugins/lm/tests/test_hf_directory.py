"""A run's model as a directory of another library: transformers, peft and TRL load it, and compute the same."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from plugins.lm.tests.causal_models import Causal
from transformers import AutoModelForCausalLM, AutoTokenizer, T5ForConditionalGeneration

import paceline
from paceline.cli.export import export as export_command
from paceline.core.errors import ConfigError, ExportError
from paceline.export.export import ExportRequest
from paceline_lm.directories import PROVENANCE
from paceline_lm.hf_directory import export_hf
from paceline_lm.peft_directory import export_peft

pytestmark = pytest.mark.integration  # accelerate, which transformers imports, starts processes

PROVERBS = Path(__file__).parents[3] / "examples" / "transformers_text.py"
WORDS = torch.arange(3, 12)[None]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of one step: a model with tied weights, an encoder-decoder, one with adapters."""
    root = tmp_path_factory.mktemp("runs")
    options: dict[str, dict[str, Any]] = {"gpt2": {}, "t5": {}, "llama": {"lora": "rank=2,target=q_proj"}}
    for kind, more in options.items():
        task = Causal(kind=kind)
        paceline.fit(task, run_dir=root / kind, max_steps=1, num_workers=0, threads=1, quiet=True, **more)
    return {kind: root / kind for kind in options}


def logits(model: Any) -> torch.Tensor:
    more = {"decoder_input_ids": WORDS} if isinstance(model, T5ForConditionalGeneration) else {}
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=WORDS, **more).logits
    return found


@pytest.mark.parametrize("kind", ["gpt2", "t5", "llama"])
def test_transformers_loads_the_trained_model(runs: dict[str, Path], kind: str) -> None:
    exported = export_hf(ExportRequest(run=runs[kind]))
    assert (exported.step, exported.difference.largest, exported.difference.samples) == (1, 0.0, 4)
    loaded = (T5ForConditionalGeneration if kind == "t5" else AutoModelForCausalLM).from_pretrained(exported.directory)
    assert torch.equal(logits(loaded), logits(paceline.load(runs[kind])))
    assert json.loads((Path(exported.directory) / PROVENANCE).read_text())["model_sha256"] == exported.model_sha256
    umask = os.umask(0)
    os.umask(umask)
    for file in Path(exported.directory).iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~umask, "another user's server reads it, too"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks transformers for it
def test_peft_loads_the_adapters_onto_the_base_model(runs: dict[str, Path], tmp_path: Path) -> None:
    exported = export_peft(ExportRequest(run=runs["llama"]), tmp_path / "adapters")
    assert exported.difference.largest < 1e-6
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"], config["task_type"]) == (2, ["q_proj"], "CAUSAL_LM")
    torch.manual_seed(0)
    base = Causal(kind="llama").build_model()
    base.save_pretrained(tmp_path / "base")
    config["base_model_name_or_path"] = str(tmp_path / "base")
    (tmp_path / "adapters" / "adapter_config.json").write_text(json.dumps(config))
    merged = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters").merge_and_unload()
    changed = merged.get_parameter("model.layers.0.self_attn.q_proj.weight") - base.get_parameter(
        "model.layers.0.self_attn.q_proj.weight"
    )
    assert changed.abs().max() > 0
    with pytest.raises(ExportError, match=r"--format peft is for runs with --lora; this one trained"):
        export_peft(ExportRequest(run=runs["gpt2"]))
    with pytest.raises(ConfigError, match=r"Type --format hf --merge for the merged model"):
        export_command(runs["llama"], format=("peft",), merge=True)


def test_a_directory_is_replaced_only_if_an_export_wrote_it(runs: dict[str, Path], tmp_path: Path) -> None:
    request = ExportRequest(run=runs["gpt2"], quantization="bf16")
    target = tmp_path / "mine"
    target.mkdir()
    (target / "thesis.txt").write_text("of mine")
    with pytest.raises(ConfigError, match=r"mine holds something else, and would be replaced. Name another with --out"):
        export_hf(request, target)
    assert (target / "thesis.txt").read_text() == "of mine"
    for _ in range(2):
        exported = export_hf(request, tmp_path / "half")
    assert AutoModelForCausalLM.from_pretrained(exported.directory).dtype == torch.bfloat16
    assert 0 < exported.difference.largest < 0.05
    assert sorted(p.name for p in tmp_path.iterdir()) == ["half", "mine"]


def test_a_model_that_computes_something_else_is_not_exported(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_model(task: Causal) -> Any:
        model = build(task)
        model.config.activation_function = "relu"  # the model was built with another, and is not asked for it again
        return model

    build = Causal.build_model
    monkeypatch.setattr(Causal, "build_model", build_model)
    with pytest.raises(ExportError, match=r"the model that hf loads does not compute the same .* Nothing was exported"):
        export_hf(ExportRequest(run=runs["gpt2"]), tmp_path / "wrong")
    assert not list(tmp_path.iterdir())


def test_a_class_of_the_users_own_is_refused(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = Causal.build_model

    def build_model(task: Causal) -> Any:
        model = build(task)
        model.__class__ = type("Mine", (type(model),), {})
        return model

    monkeypatch.setattr(Causal, "build_model", build_model)
    with pytest.raises(ExportError, match=r"transformers has no Mine, so it would load this directory as another"):
        export_hf(ExportRequest(run=runs["gpt2"]), tmp_path / "mine")


def test_a_run_whose_data_is_elsewhere_is_exported(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_dataset(task: Causal, split: str) -> Any:
        raise FileNotFoundError("chat.jsonl")

    monkeypatch.setattr(Causal, "build_dataset", build_dataset)
    exported = export_hf(ExportRequest(run=runs["llama"]), tmp_path / "hf")
    assert (exported.difference.largest, exported.split) == (0.0, "made-up inputs, without the run's data")


@pytest.mark.system
def test_trl_continues_what_the_command_exported(run_processes: Any, tmp_path: Path) -> None:
    trained = run_processes.paceline(
        *("train", f"{PROVERBS}:Proverbs", "--run-dir", tmp_path / "run", "--threads", "1", "--max-steps", "4")
    )
    assert trained.returncode == 0, trained.stderr
    done = run_processes.paceline("export", tmp_path / "run", "--format", "hf", "--json")
    assert done.returncode == 0, done.stderr
    assert "[transformers]" not in done.stderr
    exported = json.loads(done.stdout)
    assert exported["directory"] == str(tmp_path / "run" / "hf")
    tokenizer = AutoTokenizer.from_pretrained(exported["directory"])
    assert tokenizer.decode(tokenizer("Haste makes waste.").input_ids, skip_special_tokens=True)
    script = tmp_path / "sft.py"
    script.write_text(
        "from datasets import Dataset\nfrom trl import SFTConfig, SFTTrainer\n"
        f"trainer = SFTTrainer({exported['directory']!r}, args=SFTConfig('out', max_steps=2, report_to='none',\n"
        "    use_cpu=True, bf16=False, per_device_train_batch_size=2, gradient_checkpointing=False),\n"
        "    train_dataset=Dataset.from_dict({'text': ['Haste makes waste.'] * 8}))\n"
        "print('loss', trainer.train().training_loss)\n"
    )
    continued = run_processes.run([sys.executable, script], timeout_s=150)
    assert continued.returncode == 0, continued.stderr
    assert "loss " in continued.stdout
