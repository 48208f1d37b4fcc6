"""A run's metrics for Prometheus, scraped while a worker is killed, and the dashboard of Grafana that shows them."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from tests.processes import Processes

from paceline import cli
from paceline.runs.directory import RunDirectory
from paceline_pages.run_index import read_beats

TASK = """
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


@dataclass
class Slow(paceline.Task):
    defaults = paceline.Defaults(global_batch_size=8, microbatches=2)

    def build_model(self):
        return nn.Linear(1, 1)

    def build_dataset(self, split):
        return TensorDataset(torch.ones(64, 1)) if split in ("train", "val") else None

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.5)

    def loss(self, model, batch):
        time.sleep(0.005)
        return model(batch[0]).square().mean()

    def metrics(self, model, batch):
        return {"size": model(batch[0]).abs().mean(1)}
"""
BOARD = json.loads((Path(__file__).parents[4] / "docs/grafana/paceline-run.json").read_text())
Values = dict[tuple[str, tuple[str, ...]], float]


def read(port: int, token: str) -> list[Sample]:
    """Return the samples; nothing while the server is not there."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            text = answer.read().decode()
    except (ConnectionError, urllib.error.URLError):
        return []
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def scrape(port: int, token: str) -> Values:
    """Return the values by name and labels."""
    samples = read(port, token)
    return {(sample.name, tuple(sample.labels.values())): sample.value for sample in samples}


def test_a_scrape_shows_progress_and_the_time_that_a_killed_worker_cost(
    run_processes: Processes, wait_until: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(TASK)
    token, run, port = tmp_path / "token", RunDirectory(tmp_path / "run"), run_processes.free_port()
    options = ("--nproc", "2", "--threads", "1", "--epochs", "10000", "--log-every", "5", "--run-dir", run.path)
    serving = ("--metrics-port", str(port), "--metrics-token-file", token)
    command = (sys.executable, "-m", "paceline", "train", "slow.py:Slow", *options, *serving)
    training = run_processes.start(command, cwd=tmp_path)
    wait_until(lambda: token.exists() and scrape(port, token.read_text().strip()), "the server")
    secret = token.read_text().strip()
    assert scrape(port, "0" * 64) == {}

    def value(name: str, *labels: str) -> float:
        return scrape(port, secret).get((f"paceline_run_{name}", labels), 0.0)

    wait_until(lambda: value("step") > 20, "steps")
    before = scrape(port, secret)
    assert before["paceline_run_recoveries_total", ()] == 0
    assert before["paceline_run_total_steps", ()] == 80000
    assert before["paceline_run_processes", ()] == 2
    assert before["paceline_run_loss", ()] >= 0
    assert before["paceline_run_samples_per_second", ()] > 0
    assert 0 < before["paceline_run_goodput_ratio", ()] <= 1
    os.kill(read_beats(run)[1].pid, signal.SIGKILL)
    wait_until(lambda: value("recoveries_total") == 1, "the recovery")
    wait_until(lambda: value("lost_seconds", "killed") > 0, "the lost time")
    wait_until(lambda: ("paceline_run_evaluation", ("size", "val")) in scrape(port, secret), "an evaluation")
    after = scrape(port, secret)
    assert after["paceline_run_interruptions", ("killed",)] == 1
    assert after["paceline_run_restarts_total", ()] == 0
    labels = {sample.name: set(sample.labels) for sample in read(port, secret)}

    training.send_signal(signal.SIGTERM)
    assert run_processes.finish(training).returncode == 75
    for target in [target for panel in BOARD["panels"] for target in panel["targets"]]:
        names = re.findall(r"paceline_\w+", target["expr"])
        assert names
        for name in names:
            assert [of_name for of_name, _ in after if of_name == name], f"{name} of {target['expr']} is not served"
        # Prometheus adds the labels job and instance.
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"])) - {"job", "instance"}
        assert shown <= labels[names[0]], target


def test_the_file_for_grafana_is_a_dashboard() -> None:
    """Grafana itself has not loaded it here; its import needs what is checked."""
    assert (BOARD["title"], BOARD["schemaVersion"] >= 36, "__inputs" in BOARD) == ("Paceline run", True, False)
    variables = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    for variable in (variables["job"], variables["instance"]):
        assert variable["query"]["query"] == variable["definition"]
        assert re.fullmatch(r"label_values\(paceline_run_info(\{.+\})?, \w+\)", variable["definition"])
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == 9
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24, "Grafana has 24 columns"
    for panel in panels:
        assert panel["type"] in ("gauge", "stat", "timeseries")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"] in ("percentunit", "short", "s")
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
        for target in panel["targets"]:
            selected = re.findall(r"paceline_\w+({.*?})?", target["expr"])
            assert set(selected) == {'{job="$job",instance=~"$instance"}'}
            assert set(re.findall(r"\$(\w+)", str(panel))) <= set(variables)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--metrics-port", "0", "--metrics-host", "0.0.0.0"), "--metrics-token-file"),
        (("--metrics-host", "localhost"), "--metrics-port"),
    ],
)
def test_metrics_that_others_could_read_need_a_token(
    options: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["paceline", "train", "fashion-mnist-mlp", "--dry-run", *options])
    assert cli.main() == 2
    assert says in capsys.readouterr().err
