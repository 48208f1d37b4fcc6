"""The transformer recipe: its corpus, its model, and equal bits for other numbers of processes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import DataError, TaskError
from paceline_tasks.transformer import Transformer, load_stdlib_text, source_files, split_of

TINY = {"layers": 2, "width": 32, "heads": 2, "context": 32, "held_out": 8}


def test_the_corpus_is_split_by_file_and_free_of_what_was_installed(tmp_path: Path) -> None:
    for name in ("b.py", "c.py", "site-packages/x.py", "test/y.py", "_sysconfigdata_linux.py", "no.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert source_files(tmp_path) == [Path("b.py"), Path("c.py")]
    assert bytes(load_stdlib_text("train", tmp_path).tolist()) == b"b.pyc.py"
    assert {split_of(Path(f"m{n}.py")) for n in range(300)} == {"train", "val", "test"}
    with pytest.raises(DataError, match="the test split"):
        load_stdlib_text("test", tmp_path)


@pytest.mark.integration
def test_the_real_corpus_is_megabytes_of_text() -> None:
    sizes = {split: len(load_stdlib_text(split)) for split in ("train", "val", "test")}
    assert sizes["train"] > 5_000_000
    assert min(sizes["val"], sizes["test"]) > 50_000


@pytest.mark.integration
def test_a_window_follows_the_one_before() -> None:
    task = Transformer(**TINY)
    (first,), (second,) = task.build_dataset("train")[0:2][0].split(1)[0], task.build_dataset("train")[1]
    assert first.shape == (33,)
    assert first[-1] == second[0]
    assert len(task.build_dataset("val")) == 8
    assert task.build_dataset("other") is None


def test_no_position_sees_what_follows_it() -> None:
    torch.manual_seed(0)
    model = Transformer(**TINY).build_model()
    tokens = torch.randint(256, (2, 32))
    changed = tokens.clone()
    changed[:, 20:] = 7
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


@pytest.mark.integration
def test_an_untrained_model_knows_nothing() -> None:
    torch.manual_seed(0)
    task = Transformer(**TINY)
    batch = list(task.build_dataset("val")[0:4])
    metrics = task.metrics(task.build_model(), batch)
    assert metrics["bits_per_byte"].shape == (4,)
    assert metrics["bits_per_byte"].mean().item() == pytest.approx(8, abs=0.2)
    assert task.loss(task.build_model(), batch).item() == pytest.approx(math.log(256), abs=0.15)


def test_a_tied_head_is_one_parameter() -> None:
    untied, tied = (
        sum(p.numel() for p in Transformer(**TINY, tied=tied).build_model().parameters()) for tied in (False, True)
    )
    assert untied - tied == 256 * 32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 3, "width": 32}, "The nearest: 2"),
        ({"vocabulary": 100}, "at least 256"),
        ({"layers": 0}, "layers"),
    ],
)
def test_fields_that_cannot_work_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        Transformer(**fields)


@pytest.mark.slow
def test_any_number_of_processes_and_fsdp_give_one_model(run_processes: Any, tmp_path: Path) -> None:
    common = ("transformer", "--max-steps", "6", "--threads", "1", "--seed", "7", "--json", "--quiet")
    sets = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
    hashes = set()
    for name, words in (
        ("one", ()),
        ("two", ("--nproc", "2")),
        ("fsdp", ("--nproc", "2", "--strategy", "fsdp", "--fsdp-wrap", "Block")),
    ):
        done = run_processes.paceline("train", *common, *sets, *words, "--run-dir", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        assert result["metrics"]["test"]["bits_per_byte"] < 8
        hashes.add(result["model_sha256"])
    assert len(hashes) == 1
