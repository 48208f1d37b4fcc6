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
Values = dict[tuple[str, tuple[str, ...]], float]


def scrape(port: int, token: str) -> Values:
    """Return the values by name and labels; nothing while the server is not there."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            text = answer.read().decode()
    except (ConnectionError, urllib.error.URLError):
        return {}
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
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

    training.send_signal(signal.SIGTERM)
    assert run_processes.finish(training).returncode == 75
    board = (Path(__file__).parents[4] / "docs/grafana/paceline-run.json").read_text()
    names = {name for panel in json.loads(board)["panels"] for name in re.findall(r"paceline_\w+", str(panel))}
    assert len(names) > 8
    assert names <= {name for name, _ in after}


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
