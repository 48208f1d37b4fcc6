"""``paceline report``: what it says of real runs, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from plugins.pages.tests.reporting.conftest import HOSTILE

from paceline.core.errors import CheckpointError, ConfigError, DataError, RunDirectoryError
from paceline.core.stats import Estimate, Floats
from paceline.core.task import Task
from paceline.data.samples import MicroBatch
from paceline_pages.evaluation_recorder import EvaluationRecorder
from paceline_pages.evaluation_results import ClassScore
from paceline_pages.report import compare, headline
from paceline_pages.report_command import report
from paceline_pages.report_page import _weakest_first

VOID = {"meta", "img", "br", "link", "input", "hr", "col", "use", "path", "rect", "line", "circle"}


class Tags(HTMLParser):
    """Checks that tags are closed as they were opened, and collects them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def compared(reported_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The JSON and the page of three runs."""
    page = tmp_path_factory.mktemp("page") / "three.html"
    figures = said([reported_runs / name for name in ("good", HOSTILE, "seed")], output=page)
    assert figures["page"] == str(page)
    return figures, page.read_text(encoding="utf-8")


def said(runs: list[Path], **options: Any) -> dict[str, Any]:
    """What the command prints as JSON."""
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert report(runs, json=True, **options) == 0
    figures: dict[str, Any] = json.loads(out.getvalue())
    return figures


def test_the_numbers_are_those_that_the_run_recorded(compared: tuple[dict[str, Any], str], reported_runs: Path) -> None:
    for run, name in zip(compared[0]["runs"], ("good", HOSTILE, "seed"), strict=True):
        recorded = json.loads((reported_runs / name / "result.json").read_text())
        now = {metric: estimate["value"] for metric, estimate in run["metrics"].items()}
        assert now == run["recorded"] == recorded["metrics"]["test"]
        assert run["model_sha256"] == recorded["model_sha256"]
        assert run["classification"]["accuracy"]["value"] == now["accuracy"]
        assert run["classification"]["nll"]["value"] == pytest.approx(now["loss"])
        assert run["samples"] == 150
        assert sum(sum(row) for row in run["classification"]["matrix"]) == 150
        assert run["changed_numerics"] == []


def test_the_better_run_is_named_and_chance_is_not(compared: tuple[dict[str, Any], str]) -> None:
    figures = compared[0]
    slow, seed = figures["comparisons"]
    assert slow["better"] is False
    assert slow["p_value"] < 0.001
    assert slow["difference"]["high"] < 0
    assert seed["better"] is None
    assert seed["p_value"] > 0.05
    assert figures["verdict"] == f"good does not differ significantly from seed, and is better than {HOSTILE}"
    assert figures["differing_settings"]["lr"] == [0.5, 0.01, 0.5]
    assert figures["differing_settings"]["seed"] == [0, 0, 1]
    assert not {"run", "resume"} & figures["differing_settings"].keys()


def test_a_model_as_a_table(compared: tuple[dict[str, Any], str]) -> None:
    run = compared[0]["runs"][0]
    layers = [(layer["kind"], layer["shape"], layer["parameters"]) for layer in run["layers"]]
    assert layers == [
        ("Flatten", [64], 0),
        ("Linear", [16], 64 * 16 + 16),
        ("BatchNorm1d", [16], 32),
        ("ReLU", [16], 0),
        ("Linear", [4], 68),
    ]
    assert run["parameters"] == run["trained_parameters"] == sum(count for _, _, count in layers)


def test_the_page_is_whole_and_what_users_write_stays_text(compared: tuple[dict[str, Any], str]) -> None:
    page = compared[1]
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert len(tags.ids) == len(set(tags.ids))
    kinds = {tag for tag, _ in tags.seen}
    assert "script" not in kinds
    assert not {"iframe", "object", "embed", "link", "form"} & kinds
    for _, attributes in tags.seen:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/png;base64,"))
    # They are there, as text.
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    assert "document.title=" in page
    assert "$x^2$" in page


def test_charts_take_the_pages_colours_and_have_their_numbers_as_tables(
    compared: tuple[dict[str, Any], str],
) -> None:
    page = compared[1]
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    titles = [re.search(r"<title>(.*?)</title>", drawing) for drawing in drawings]
    names = [title[1] for title in titles if title]
    assert len(names) == len(drawings)
    for name in ("Loss", "Validation accuracy", "Learning rate", "Throughput"):
        assert name in names
    assert "Accuracy by confidence" in names
    assert "Seconds by phase, rank 0" in names
    assert {"ROC of a &amp; b", "Precision and recall of a &amp; b"} <= set(names)
    for label in (">loss<", ">accuracy<", ">learning rate<", ">samples/s<", ">MiB<", ">false positive rate<"):
        assert label in page  # the axes
    for drawing in drawings:
        assert not set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", drawing)) - {"#000000"}
        assert "var(--" in drawing
        assert "font-family" not in drawing
    assert page.count("<figure>") == page.count("</svg>") == page.count("<summary>Numbers</summary>")


def test_the_command_trains_the_same_model_again(
    compared: tuple[dict[str, Any], str], run_processes: Any, tmp_path: Path
) -> None:
    run = compared[0]["runs"][2]
    program, *words = shlex.split(run["command"])
    assert program == "paceline"
    command = [sys.executable, "-m", "paceline", *words, "--run-dir", tmp_path / "again", "--json", "--quiet"]
    done = run_processes.run(command, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["model_sha256"] == run["model_sha256"]


def test_a_task_without_classes_has_the_parts_that_need_none(reported_runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "line.html"
    figures = said([reported_runs / "line"], output=page, split="val")
    run = figures["runs"][0]
    assert run["classification"] is None
    assert run["metrics"]["absolute_error"]["method"] == "bootstrap over samples"
    assert run["metrics"]["weighted"]["low"] is None, "three batches are too few"
    text = page.read_text(encoding="utf-8")
    assert 'id="classes"' not in text
    assert "<figcaption>Loss</figcaption>" in text


def test_a_regression_has_its_errors_by_slice_and_the_largest_with_their_columns(
    reported_runs: Path, tmp_path: Path
) -> None:
    page = tmp_path / "line.html"
    (run,) = said([reported_runs / "line"], output=page, split="val")["runs"]
    regression = run["regression"]
    assert regression["target"] == "total"
    assert regression["mae"]["value"] == pytest.approx(run["metrics"]["absolute_error"]["value"])
    assert regression["rmse"]["low"] < regression["rmse"]["value"] < regression["rmse"]["high"]
    assert {part["column"] for part in regression["slices"]} == {"age", "<b>income</b>", "height", "total"}
    errors = [part["mae"]["value"] for part in regression["slices"]]
    assert errors == sorted(errors, reverse=True)
    misses = [abs(miss["predicted"] - miss["actual"]) for miss in regression["largest_errors"]]
    assert misses == sorted(misses, reverse=True)
    text = page.read_text(encoding="utf-8")
    for name in ("Predicted and true", "Residuals", "Distribution of the residuals"):
        assert f"<figcaption>{name}</figcaption>" in text
    for label in (">true total<", ">predicted total<", ">residual (predicted - true)<"):
        assert label in text
    assert '<th class="n">&lt;b&gt;income&lt;/b&gt;</th>' in text
    assert "<b>income" not in text


def test_runs_on_other_data_are_not_compared(reported_runs: Path, tmp_path: Path) -> None:
    runs = [reported_runs / "good", reported_runs / "line"]
    figures = said(runs, output=tmp_path / "both.html", split="val")
    assert figures["verdict"] == "These runs cannot be compared"
    assert figures["comparisons"][0]["why_not"] == "it does not have accuracy"


def test_runs_with_other_batch_sizes_are_compared(reported_runs: Path, tmp_path: Path) -> None:
    runs = [reported_runs / "line", reported_runs / "small-batches"]
    figures = said(runs, output=tmp_path / "both.html", split="val")
    assert figures["differing_settings"]["global_batch_size"] == [16, 4]
    (comparison,) = figures["comparisons"]
    assert (comparison["why_not"], comparison["better"]) == ("", True)


def digest(*columns: torch.Tensor, block: int) -> str:
    """Of the columns of some data, evaluated in blocks of so many samples."""
    observer = EvaluationRecorder(Task(), None)
    for number, parts in enumerate(zip(*(column.split(block) for column in columns), strict=True)):
        observer(MicroBatch(number, parts, len(parts[0]), 0), {})
    return observer.data_sha256


def test_the_digest_is_the_datas_and_not_that_of_its_blocks() -> None:
    tokens, labels = torch.arange(120).reshape(20, 6), torch.arange(20)
    own = digest(tokens, labels, block=20)
    assert {digest(tokens, labels, block=block) for block in (1, 7, 19, 64)} == {own}
    others = [
        (tokens.flip(0), labels),
        (tokens, labels.flip(0)),
        (tokens[:-1], labels[:-1]),
        (tokens.reshape(40, 3), labels),
        (tokens.reshape(20, 3, 2), labels),
        (tokens.int(), labels),
    ]
    assert len({own, *(digest(*columns, block=64) for columns in others)}) == 1 + len(others)


def analysis(name: str, losses: Floats) -> Any:
    """What a comparison reads of a run whose metric is its loss."""
    return SimpleNamespace(
        record=SimpleNamespace(name=name),
        main_metric="loss",
        more_is_better=False,
        metrics={"loss": Estimate(float(losses.mean()))},
        per_sample={"loss": losses},
        split="test",
        data=SimpleNamespace(sha256="0"),
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("both", [False, True])
def test_a_run_that_diverged_is_not_called_better(value: float, both: bool) -> None:
    diverged, healthy = np.full(50, 0.5), np.linspace(0.1, 0.9, 50)
    diverged[7] = value
    if both:
        healthy[7] = value
    runs = [analysis("diverged", diverged), analysis("healthy", healthy)]
    for first, other in (runs, runs[::-1]):
        (found,) = comparisons = compare([first, other])
        assert (found.difference, found.better) == (None, None)
        assert re.search(r"loss is NaN or infinite for 1 of (diverged|healthy)'s 50 samples", found.why_not)
        assert headline([first, other], comparisons).headline == "These runs cannot be compared"


def test_classes_without_samples_come_last() -> None:
    shown = _weakest_first(
        [score("none", 0, None), score("good", 5, 0.9), score("weak", 2, 0.1), score("weak, many", 9, 0.1)]
    )
    assert [each.label for each in shown] == ["weak, many", "weak", "good", "none"]


def score(label: str, support: int, f1: float | None) -> ClassScore:
    return ClassScore(label=label, support=support, predicted=0, precision=None, recall=None, f1=f1)


def test_a_checkpoint_can_be_named(reported_runs: Path, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    first = said([reported_runs / "good"], output=output, checkpoint="5")["runs"][0]
    assert (first["step"], first["recorded"]) == (5, {})
    last = said([reported_runs / "good"], output=output, checkpoint="last")["runs"][0]
    assert last["step"] == 10
    assert first["metrics"]["loss"]["value"] > last["metrics"]["loss"]["value"]


@pytest.mark.parametrize(
    ("run", "options", "error", "message"),
    [
        ("line", {}, DataError, "line has no test split. Use --split val."),
        (
            "good",
            {"checkpoint": "7"},
            ConfigError,
            r"no checkpoint of step 7\. The nearest: 5, 10",
        ),
        (
            "good",
            {"checkpoint": "first"},
            ConfigError,
            "best, last or a number of steps such as 500, but is 'first'",
        ),
        ("none", {}, RunDirectoryError, "none is not a run directory"),
        ("good", {"output": Path("missing/page.html")}, ConfigError, "the folder missing does not exist"),
        ("good", {"output": Path("/")}, ConfigError, "is a folder"),
    ],
)
def test_what_cannot_be_reported_is_said_in_a_sentence(
    reported_runs: Path,
    tmp_path: Path,
    run: str,
    options: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    before = sorted(reported_runs.rglob("*"))
    with pytest.raises(error, match=message):
        report([reported_runs / run], **{"output": tmp_path / "page.html", **options})
    assert sorted(reported_runs.rglob("*")) == before
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_not_believed(reported_runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(reported_runs / "good", run, symlinks=True)
    for path in run.glob("checkpoints/step-*/model.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match="holds no checkpoint that verifies"):
        report([run])
    assert not (run / "report.html").exists()


def test_a_run_that_never_finished_is_reported_as_far_as_it_came(reported_runs: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(reported_runs / "good", run, symlinks=True)
    (run / "result.json").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": "x", "loss": [1], "ranks": 3}\n{"kind": "eval", "metrics": 1}\n{')
    figures = said([run])
    assert figures["page"] == str(run / "report.html")
    assert (run / "report.html").is_file()
    assert figures["runs"][0]["state"] == "not finished"
    assert figures["runs"][0]["recorded"] == {}


def test_what_is_missing_is_named_before_anything_is_evaluated(
    reported_runs: Path, run_processes: Any, tmp_path: Path
) -> None:
    hidden = tmp_path / "hidden"
    (hidden / "matplotlib").mkdir(parents=True)
    (hidden / "matplotlib" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'matplotlib'\", name='matplotlib')"
    )
    path = os.pathsep.join([str(hidden), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = run_processes.run(
        [sys.executable, "-m", "paceline", "report", reported_runs / "good"], env={"PYTHONPATH": path}
    )
    assert done.returncode == 2
    assert "needs matplotlib" in done.stderr
    assert "pip install 'jinja2<" in done.stderr
    assert not (reported_runs / "good" / "report.html").exists()


def test_a_search_is_not_a_run_but_has_some(tmp_path: Path) -> None:
    (tmp_path / "tune.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is a search, not a run\. Give its trials, such as .*trials/00000"):
        report([tmp_path])
