"""``hf:MODEL``: a pretrained directory as a task, and what is refused."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from plugins.lm.tests.directories import TEXTS, build_tiny, save_model, write_lines

import paceline
from paceline import cli
from paceline_lm import LanguageModel

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "llama")


def test_a_directory_is_trained_by_its_name_and_its_flags_are_fields(
    run_processes: Any, llama: Path, tmp_path: Path
) -> None:
    write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    shutil.copytree(llama, tmp_path / "model")
    options = ("--threads", "1", "--max-steps", "2", "--num-workers", "0", "--quiet", "--run-dir", "run")
    done = run_processes.paceline(
        "train", "hf:model", "--data", "texts.jsonl", "--context=8", "--from-scratch", *options
    )
    assert done.returncode == 0, done.stderr
    recorded = tomllib.loads((tmp_path / "run" / "run.toml").read_text())["task"]
    assert recorded["spec"] == "paceline_lm:LanguageModel"
    fields = recorded["fields"]
    assert (fields["model"], fields["data"]) == (str(tmp_path / "model"), str(tmp_path / "texts.jsonl"))
    assert (fields["context"], fields["from_scratch"]) == (8, True)


def test_weights_are_trained_in_fp32_whatever_the_file_has(llama: Path) -> None:
    model = LanguageModel(model=str(llama)).build_model()
    expected = build_tiny("llama", model.config.vocab_size).bfloat16().float().state_dict()
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, expected[name]), name
    torch.manual_seed(1)
    fresh = LanguageModel(model=str(llama), from_scratch=True).build_model()
    assert next(fresh.parameters()).dtype == torch.float32
    assert not torch.equal(fresh.lm_head.weight, model.lm_head.weight)


def test_what_could_run_code_and_what_is_missing_is_refused(llama: Path, tmp_path: Path) -> None:
    pickled = shutil.copytree(llama, tmp_path / "pickled", ignore=shutil.ignore_patterns("*.safetensors", "tokenizer*"))
    with pytest.raises(paceline.TaskError, match=r"has no weights\. Give --from-scratch"):
        LanguageModel(model=str(pickled)).build_model()
    torch.save({}, pickled / "pytorch_model.bin")
    with pytest.raises(paceline.TaskError, match=r"only pickled weights \(pytorch_model.bin\), which can run code"):
        LanguageModel(model=str(pickled)).build_model()
    with pytest.raises(paceline.TaskError, match=r"cannot load its tokenizer: there is no tokenizer.json"):
        LanguageModel(model=str(pickled)).build_tokenizer()
    settings = json.loads((pickled / "config.json").read_text())
    settings |= {"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}, "model_type": "own"}
    (pickled / "config.json").write_text(json.dumps(settings))
    (pickled / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(paceline.TaskError, match=r"needs code of its own repository \(auto_map\)"):
        LanguageModel(model=str(pickled), from_scratch=True).build_model()
    assert not (tmp_path / "ran").exists()
    with pytest.raises(paceline.TaskError, match=r"there is no config.json"):
        LanguageModel(model=str(tmp_path)).build_model()


def test_a_flag_of_a_field_needs_its_value(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["paceline", "train", "hf:model", "--data", "--from-scratch"])
    assert cli.main() == 2
    assert capsys.readouterr().err == "paceline: --data needs a value.\n"
