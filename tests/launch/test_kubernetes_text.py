"""What ``--on kubernetes --dry-run`` prints, compared whole, and known to the published models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.lab.kubernetes_api import check

from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.launch.kubernetes import Kubernetes
from paceline.launch.launcher import LaunchSpec, RenderedJob
from paceline.launch.options import KubernetesOptions
from paceline.launch.submit import jobs_directory, task_job

pytestmark = pytest.mark.k8s
IMAGE = "registry.example/train:1"


def text(name: str) -> str:
    """What is to be printed."""
    return (Path(__file__).parent / "kubernetes_texts" / name).read_text()


def render(options: dict[str, Any], **fields: Any) -> RenderedJob:
    described = {
        "command": ("python", "train.py", "--lr", "0.1"),
        "name": "train",
        "directory": Path("/state/t-1"),
        "nodes": (2, 2),
        "nproc": (4,),
        "python": "python",
        **fields,
    }
    rendered = Kubernetes().render(LaunchSpec(**described), KubernetesOptions(**{"image": IMAGE, **options}))
    documents = list(yaml.safe_load_all(rendered.files["job.yaml"]))
    assert documents == list(rendered.objects)
    for document in documents:
        check(document)
    return rendered


def test_an_indexed_job() -> None:
    rendered = render(
        {
            "kind": "job",
            "namespace": "team",
            "volume": ("runs:/runs",),
            "memory": "64Gi",
            "service_account": "trainer",
            "secret": ("HF_TOKEN=hub/token",),
            "label": ("team=vision",),
            "node_selector": ("zone=a",),
            "workdir": "/work",
            "grace": "2min",
        },
        gpus_per_node=4,
        cpus_per_task=8,
        walltime_s=7200.0,
        env={"NOTE": "it's $(HOME)"},
        threads=2,
    )
    assert rendered.text == text("indexed-job.yaml")


def test_a_train_job_with_a_runtime_of_its_own() -> None:
    run = ("python", "-m", "paceline", "train", "fashion-mnist", "--run-dir", "/runs/a")
    rendered = render(
        {"volume": ("runs:/runs",)},
        nodes=(2, 4),
        rank_launcher="agent",
        is_task=True,
        run=Path("/runs/a"),
        command=run,
    )
    assert rendered.text == text("train-job.yaml")


def test_a_train_job_with_a_runtime_of_the_clusters() -> None:
    options = {"runtime": "torch-distributed", "volume": ("runs:/runs",)}
    assert render(options, walltime_s=60.0, gpus_per_node=4).text == text("runtime-of-the-clusters.yaml")


def test_a_job_set() -> None:
    assert render({"kind": "jobset"}, nodes=(1, 1), nproc=(2,)).text == text("job-set.yaml")


@pytest.mark.parametrize(
    ("options", "fields", "message"),
    [
        ({"image": None}, {}, "needs --image"),
        ({"kind": "pod"}, {}, "--kind must be one of trainjob, jobset, job, but is 'pod'"),
        ({"namespace": "My Team"}, {}, "--namespace"),
        ({"memory": "64 GB"}, {}, "--memory must be a quantity such as 64Gi"),
        ({"kind": "job", "runtime": "torch"}, {}, "--runtime is only for --kind trainjob"),
        ({"runtime": "torch", "workdir": "/w"}, {}, "--workdir cannot be combined with --runtime"),
        ({"volume": ("runs",)}, {}, "--volume must be CLAIM:/PATH"),
        ({"volume": ("a:/x", "b:/x")}, {}, "repeats a claim or a path"),
        ({"secret": ("HF_TOKEN=abc",)}, {}, "--secret must be VARIABLE=SECRET/KEY"),
        ({"label": ("a b=c",)}, {}, "--label must be KEY=VALUE"),
        ({"node_selector": ("zone",)}, {}, "--node-selector must be KEY=VALUE"),
        ({"grace": "0s"}, {}, "--grace must be a duration such as 90s"),
        ({}, {"env": {"HF_TOKEN": "x"}}, "--secret VARIABLE=SECRET/KEY"),
        ({}, {"directory": Path("/state/1train")}, "Give another --name"),
        ({}, {"directory": Path("/state") / ("a" * 60)}, "have at most 54 characters"),
        ({}, {"run": Path("/data/a"), "is_task": True}, "--run-dir /data/a is not in a volume"),
        ({}, {"nodes": (1, 2), "rank_launcher": "spawn"}, "--nodes MIN:MAX"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_before(
    options: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        render(options, **fields)


@pytest.mark.parametrize("run", [None, "runs/a"])
def test_a_run_needs_a_place_in_the_pods(run: str | None) -> None:
    with pytest.raises(ConfigError, match="Give --run-dir with an absolute path there"):
        task_job(RunConfig(task="fashion-mnist", run_dir=run), {}, Kubernetes(), "python")
    spec = task_job(RunConfig(task="fashion-mnist", run_dir="/runs/a"), {}, Kubernetes(), "python")
    assert (spec.run, spec.rank_launcher) == (Path("/runs/a"), "agent")
    assert spec.directory.parent == jobs_directory()


def test_addresses_and_settings_are_no_secrets() -> None:
    render({}, env={"TOKENIZERS_PARALLELISM": "false", "MONKEY": "1"})
