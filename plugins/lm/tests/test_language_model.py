"""``hf:MODEL``: a pretrained directory as a task, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from plugins.lm.tests.directories import TEXTS, build_tiny, save_model, write_lines

import paceline
from paceline import cli
from paceline.data.audit import audit
from paceline.runs.directory import RunDirectory
from paceline.torch_internals import FakeTensorMode
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


def test_a_budget_in_tokens_decides_the_steps(run_processes: Any, llama: Path, tmp_path: Path) -> None:
    np.arange(256, dtype="<u2").tofile(tmp_path / "a.bin")
    np.arange(64, dtype="<u2").tofile(tmp_path / "b.bin")
    words = ("train", f"hf:{llama}", "--data", "bin:*.bin", "--context", "16", "--from-scratch", "--tokens", "0.64K")
    rates = ("--lr-schedule", "cosine", "--warmup", "20%", "--global-batch-size", "4", "--set", "lr=0.01")
    options = ("--threads", "1", "--num-workers", "0", "--run-dir")
    done = run_processes.paceline(*words, *rates, *options, "run")
    assert done.returncode == 0, done.stderr
    run = RunDirectory(tmp_path / "run")
    assert (run.read_result() or {})["steps"] == 10  # of 4 samples of 16 tokens
    assert audit(run).clean
    fields = tomllib.loads((tmp_path / "run" / "run.toml").read_text())["task"]["fields"]
    assert (fields["tokens"], fields["warmup"], fields["lr_schedule"]) == (640, 0.2, "cosine")
    said = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert "*.bin (2 files): 320 tokens, 20 samples of 16" in said
    assert "an epoch has 40 samples, 640 tokens; by tokens: *.bin 100.0% (2 times)" in said
    done = run_processes.paceline(*words, *rates, *options, "two", "--epochs", "2")
    assert "--tokens is the length of the run: leave --epochs out" in done.stderr
    texts = write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    streamed = LanguageModel(model=str(llama), data=f"stream:{texts}", tokens=64, from_scratch=True)
    with pytest.raises(paceline.TaskError, match=r"--tokens is the length of the run: leave --epochs out"):
        paceline.fit(streamed, epochs=2, run_dir=tmp_path / "stream", num_workers=0, threads=1)
    with pytest.raises(paceline.TaskError, match=r"--tokens 20X: give a number of tokens, such as 500M or 20B"):
        LanguageModel(model=str(llama), tokens="20X")


def test_weights_are_trained_in_fp32_whatever_the_file_has(llama: Path) -> None:
    model = LanguageModel(model=str(llama)).build_model()
    expected = build_tiny("llama", model.config.vocab_size).bfloat16().float().state_dict()
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, expected[name]), name
    with FakeTensorMode():  # as `paceline plan` builds it
        planned = LanguageModel(model=str(llama)).build_model()
    assert planned.lm_head.weight.shape == model.lm_head.weight.shape
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


def test_a_name_that_cannot_be_loaded_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(paceline.TaskError, match=r"hf:nowhere: there is no such directory, and .* is ORG/NAME"):
        LanguageModel(model="nowhere").build_model()
    monkeypatch.setattr("paceline_lm.language_model.ENDPOINT", "https://hub.invalid")
    monkeypatch.setattr("paceline_lm.language_model.HF_HUB_OFFLINE", False)
    for variable in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(variable)
    with pytest.raises(paceline.TaskError, match=r"hf:no/where: the Hub cannot be reached \("):
        LanguageModel(model="no/where").build_model()


def test_a_flag_of_a_field_needs_its_value(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["paceline", "train", "hf:model", "--data", "--from-scratch"])
    assert cli.main() == 2
    assert capsys.readouterr().err == "paceline: --data needs a value.\n"


def test_help_lists_the_flags_of_a_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["paceline", "train", "hf:model", "--help"])
    assert cli.main() == 0
    said = capsys.readouterr().out
    assert "Options of hf:MODEL:\n  --data PLACE" in said
    assert "--from-scratch " in said


def test_a_task_that_is_written_out_has_the_bits_of_its_command(
    run_processes: Any, llama: Path, tmp_path: Path
) -> None:
    write_lines(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    words = (f"hf:{llama}", "--data", "texts.jsonl", "--pack", "32", "--warmup", "50%", "--set", "lr=0.01")
    shown = run_processes.paceline("show-task", *words)
    assert shown.returncode == 0, shown.stderr
    (tmp_path / "mine.py").write_text(shown.stdout)
    options = ("--max-steps", "3", "--threads", "1", "--num-workers", "0", "--quiet", "--run-dir")
    found = set()
    for run, task in {"command": words, "class": ("mine.py:MyTask",)}.items():
        done = run_processes.paceline("train", *task, *options, run)
        assert done.returncode == 0, done.stderr
        found.add(json.loads((tmp_path / run / "result.json").read_text())["model_sha256"])
        records = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        assert records[-1]["logged"]["tokens_per_s"] > 0
        assert 0 < records[-1]["logged"]["mfu"] < 1
    assert len(found) == 1
    refused = run_processes.paceline("show-task", "mine.py:MyTask")
    assert refused.returncode == 2
    assert "mine.py:MyTask is one already" in refused.stderr


def write_chats(file: Path) -> Path:
    turns = [(TEXTS[n % 8], TEXTS[(n * 3) % 8] * (1 + n % 3)) for n in range(24)]
    return write_lines(
        file,
        [
            {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
            for asked, answer in turns
        ],
    )


OPTIONS = ("--microbatches", "6", "--global-batch-size", "6", "--epochs", "2", "--threads", "1", "--num-workers", "0")


def train(run_processes: Any, model: Path, data: Path | str, run: Path, *options: str) -> Any:
    own = ("--data", str(data), "--pack", "64", "--set", "lr=0.01", "--run-dir", str(run))
    return run_processes.start([sys.executable, "-m", "paceline", "train", f"hf:{model}", *own, *OPTIONS, *options])


def hashes(run_processes: Any, started: dict[Path, Any]) -> set[str]:
    found = set()
    for run, popen in started.items():
        finished = run_processes.finish(popen, timeout_s=200)
        assert finished.returncode == 0, finished.stderr
        found.add(json.loads((run / "result.json").read_text())["model_sha256"])
    return found


def test_packed_chats_have_one_hash_on_one_process_and_two(run_processes: Any, llama: Path, tmp_path: Path) -> None:
    data = write_chats(tmp_path / "chats.jsonl")
    runs = {tmp_path / f"run{nproc}": ("--nproc", str(nproc)) for nproc in (1, 2)}
    started = {run: train(run_processes, llama, data, run, *options) for run, options in runs.items()}
    assert len(hashes(run_processes, started)) == 1
    audited = audit(RunDirectory(tmp_path / "run2"))
    assert audited.clean, audited.verdict
    assert len(audited.epochs) == 2
    assert "of 2 epochs seen exactly once. Together they are 24 documents, each once an epoch." in audited.verdict
    said = (tmp_path / "run2" / "logs" / "rank-0.log").read_text()
    assert "chats.jsonl: 24 documents" in said
    assert "<|im_start|>assistant\n[He" in said or "<|im_start|>assistant\n[She" in said


def test_samples_are_logged_at_each_evaluation_and_leave_the_bits(
    run_processes: Any, llama: Path, tmp_path: Path
) -> None:
    data, prompts = write_chats(tmp_path / "chats.jsonl"), tmp_path / "prompts.txt"
    prompts.write_text("Who sees?\n\nWhat is wanted?\n")
    samples = ("--eval-samples", str(prompts))
    runs = {"without": (), "with": samples, "sharded": (*samples, "--nproc", "2", "--strategy", "fsdp")}
    started = {
        tmp_path / name: train(run_processes, llama, data, tmp_path / name, "--val-fraction", "0.25", *options)
        for name, options in runs.items()
    }
    assert len(hashes(run_processes, started)) == 1
    texts = [sorted((tmp_path / run / "media" / "samples").glob("*.txt")) for run in ("with", "sharded")]
    assert len(texts[0]) == 2
    assert [file.read_text() for file in texts[0]] == [file.read_text() for file in texts[1]]
    assert texts[0][0].read_text().startswith("Who sees? -> ")


@pytest.mark.slow
def test_a_mixture_of_packs_with_adapters_and_a_validation_split_has_one_hash(
    run_processes: Any, llama: Path, tmp_path: Path
) -> None:
    texts = write_lines(tmp_path / "texts-0.jsonl", [{"text": text} for text in TEXTS])
    data = f"{write_chats(tmp_path / 'chats.jsonl')}=0.8,file://{texts.parent}/texts-*.jsonl=0.2"
    options = ("--lora", "rank=2", "--val-fraction", "0.25")
    runs = {tmp_path / f"run{nproc}": (*options, "--nproc", str(nproc)) for nproc in (1, 3)}
    started = {run: train(run_processes, llama, data, run, *its) for run, its in runs.items()}
    assert len(hashes(run_processes, started)) == 1
    results = [json.loads((run / "result.json").read_text())["metrics"]["val"] for run in runs]
    assert results[0] == results[1]
    audited = audit(RunDirectory(tmp_path / "run3"))
    assert audited.clean, audited.verdict
    assert "tokens; by tokens: chats.jsonl 7" in (tmp_path / "run3" / "logs" / "rank-0.log").read_text()


def test_a_new_model_has_as_many_positions_as_its_context(llama: Path, tmp_path: Path) -> None:
    gpt2 = save_model(tmp_path / "gpt2", "gpt2")
    np.arange(256, dtype="<u2").tofile(tmp_path / "a.bin")
    data = f"bin:{tmp_path / 'a.bin'}"
    task = LanguageModel(model=str(gpt2), data=data, context=128, from_scratch=True)
    sample = task.build_dataset("train")[1]
    loss = task.loss(task.build_model(), task.collate([sample]))
    assert (loss.weight, loss.sum.isfinite()) == (127, True)
    texts = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    packed = LanguageModel(model=str(gpt2), data=str(texts), pack=256)
    loss = packed.loss(packed.build_model(), packed.collate([packed.build_dataset("train")[0]]))
    assert loss.sum.isfinite()
    for fields, message in [
        ({"context": 128}, r"--context 128: hf:.* has 64 positions"),
        ({"context": 64, "pack": 32}, r"--context 64 does not fit into --pack 32"),
        ({"context": 64, "pack": 64}, r"--pack is for documents"),
    ]:
        with pytest.raises(paceline.TaskError, match=message):
            LanguageModel(model=str(gpt2), data=data, **fields).build_dataset("train")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strategy", "more"),
    [
        *((kind, strategy, ()) for kind in ("llama", "qwen2", "gpt2") for strategy in ("ddp", "zero1", "fsdp")),
        ("qwen2", "ddp", ("--lora", "rank=4")),
        ("llama", "fsdp", ("--lora", "rank=4")),
        ("qwen2", "ddp", ("--lora", "rank=4,quantize=nf4")),
        ("llama", "fsdp", ("--lora", "rank=4,quantize=nf4")),
    ],
)
def test_killed_on_two_processes_and_resumed_on_three(
    run_processes: Any, tmp_path: Path, kind: str, strategy: str, more: tuple[str, ...]
) -> None:
    model, data = save_model(tmp_path / kind, kind), write_chats(tmp_path / "chats.jsonl")
    alone = {tmp_path / "one": train(run_processes, model, data, tmp_path / "one", *more)}
    killed = tmp_path / "killed"
    options = ("--nproc", "2", "--strategy", strategy, "--checkpoint-every", "1steps", "--max-restarts", "0")
    popen = train(run_processes, model, data, killed, *options, *more)
    while popen.poll() is None and len(list((killed / "checkpoints").glob("step*"))) < 2:
        time.sleep(0.02)
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (*psutil.Process(popen.pid).children(recursive=True), psutil.Process(popen.pid)):
            process.kill()
    run_processes.finish(popen, timeout_s=60)
    resumed = run_processes.start([sys.executable, "-m", "paceline", "resume", str(killed), "--nproc", "3", "--quiet"])
    assert len(hashes(run_processes, {**alone, killed: resumed})) == 1
    assert audit(RunDirectory(killed)).clean
