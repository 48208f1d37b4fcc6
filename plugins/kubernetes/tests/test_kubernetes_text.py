"""What ``--on kubernetes --dry-run`` prints, compared whole, and known to the published models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.lab.kubernetes_api import check

from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError
from paceline.launch.job_records import jobs_directory
from paceline.launch.launcher import LaunchSpec, RenderedJob
from paceline.launch.submit import task_job
from paceline_kubernetes.api import _PLURALS
from paceline_kubernetes.launcher import Kubernetes
from paceline_kubernetes.options import KubernetesOptions

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
    assert documents == list(rendered.request)
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
        ({"toleration": ("gpu:Never",)}, {}, "--toleration must be KEY"),
        ({"resource": ("rdma/hca",)}, {}, "--resource must be NAME=COUNT"),
        ({"priority_class": "Very High"}, {}, "--priority-class must be the name of a class"),
        ({"image_pull_secret": ("a/b",)}, {}, "--image-pull-secret must be the name of a secret"),
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


def pod_of(rendered: RenderedJob, kind: str) -> Any:
    """The pods' specification, wherever the kind has it."""
    [found] = [each for each in objects_of(rendered) if each["kind"] == kind]
    spec = found["spec"]
    if kind == "Job":
        return spec["template"]["spec"]
    job_set = spec["template"]["spec"] if kind == "TrainingRuntime" else spec
    return job_set["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def objects_of(rendered: RenderedJob) -> list[Any]:
    """The manifests."""
    return list(yaml.safe_load_all(rendered.files["job.yaml"]))


@pytest.mark.parametrize(("kind", "holder"), [("job", "Job"), ("jobset", "JobSet"), ("trainjob", "TrainingRuntime")])
def test_where_pods_may_run_and_what_they_get(kind: str, holder: str) -> None:
    options = {
        "kind": kind,
        "toleration": ("nvidia.com/gpu:NoSchedule", "team=vision", "spot="),
        "priority_class": "research",
        "image_pull_secret": ("registry", "mirror"),
        "host_network": True,
        "resource": ("rdma/hca=2", "hugepages-2Mi=1Gi"),
    }
    rendered = render(options, gpus_per_node=4)
    pod = pod_of(rendered, holder)
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "vision"},
        {"key": "spot", "operator": "Equal", "value": ""},
    ]
    assert pod["priorityClassName"] == "research"
    assert pod["imagePullSecrets"] == [{"name": "registry"}, {"name": "mirror"}]
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    trainer = objects_of(rendered)[-1]["spec"].get("trainer")
    resources = pod["containers"][0]["resources"] if trainer is None else trainer["resourcesPerNode"]
    assert resources["limits"] == {"nvidia.com/gpu": "4", "rdma/hca": "2", "hugepages-2Mi": "1Gi"}


@pytest.mark.parametrize(("kind", "holder"), [("job", "Job"), ("jobset", "JobSet"), ("trainjob", "TrainingRuntime")])
def test_pods_of_a_user_meet_the_restricted_standard(kind: str, holder: str) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards, and a read-only root file system."""
    rendered = render({"kind": kind, "user": "1000:2000", "volume": ("runs:/runs",)})
    pod = pod_of(rendered, holder)
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 2000,
        "fsGroup": 2000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert pod["automountServiceAccountToken"] is False
    [container] = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/dev/shm", "/tmp", "/runs"}
    assert {next(iter(volume.keys() - {"name"})) for volume in pod["volumes"]} <= {"emptyDir", "persistentVolumeClaim"}
    trainer = objects_of(rendered)[-1]["spec"].get("trainer")
    assert {"name": "HOME", "value": "/tmp"} in (container if trainer is None else trainer)["env"]


def test_the_pages_role_is_what_submitting_and_following_need() -> None:
    page = (Path(__file__).parents[3] / "docs/launchers/kubernetes.md").read_text()
    (text,) = [block for block in re.findall(r"^```text\n(.*?)^```$", page, re.M | re.S) if "kind: Role" in block]
    role, policy = yaml.safe_load_all(text)
    allowed = {
        (group, name): set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for name in rule["resources"]
    }
    for group, _, plural in _PLURALS.values():
        assert allowed.pop((group, plural)) == {"create", "get", "patch", "delete"}
    assert allowed == {("", "pods"): {"list"}, ("", "pods/log"): {"get"}}
    chosen = policy["spec"]["podSelector"]
    assert chosen["matchLabels"].items() <= pod_labels().items()
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": chosen}]}]


def pod_labels() -> Any:
    (job_set,) = objects_of(render({"kind": "jobset"}))
    return job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"]["labels"]


def test_a_patch_is_merged_by_kind_and_name(tmp_path: Path) -> None:
    path = tmp_path / "patch.yaml"
    path.write_text(
        """
kind: Job
metadata: {annotations: {owner: me}}
spec:
  ttlSecondsAfterFinished: 600
  template:
    spec:
      affinity: {nodeAffinity: {}}
      terminationGracePeriodSeconds: null
      containers:
        - name: node
          securityContext: {capabilities: {add: [IPC_LOCK]}}
          env: [{name: NCCL_DEBUG, value: INFO}, {name: PYTHONUNBUFFERED, $patch: delete}]
          volumeMounts: [{mountPath: /data, name: data}]
        - {name: sidecar, image: "metrics:1"}
      volumes: [{name: data, emptyDir: {}}]
"""
    )
    plain, patched = render({"kind": "job"}), render({"kind": "job", "patch": str(path)})
    before, after = pod_of(plain, "Job"), pod_of(patched, "Job")
    assert [each["kind"] for each in objects_of(patched)] == ["Service", "Job"]
    job = objects_of(patched)[-1]
    assert job["metadata"]["annotations"] == {"owner": "me"}
    assert job["metadata"]["name"] == "t-1"
    assert job["spec"]["ttlSecondsAfterFinished"] == 600
    assert after["affinity"] == {"nodeAffinity": {}}
    assert "terminationGracePeriodSeconds" in before.keys() - after.keys()
    [node, sidecar] = after["containers"]
    [old] = before["containers"]
    assert node["image"] == old["image"]
    assert node["env"] == [*old["env"][1:], {"name": "NCCL_DEBUG", "value": "INFO"}]
    assert node["volumeMounts"] == [*old["volumeMounts"], {"mountPath": "/data", "name": "data"}]
    assert sidecar == {"name": "sidecar", "image": "metrics:1"}
    assert after["volumes"] == [*before["volumes"], {"name": "data", "emptyDir": {}}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("kind: Pod", "this job has no 'Pod', but Service, Job"),
        ("spec: {}", "each document must be an object with a kind, one of Service, Job"),
        ("kind: Job\nmetadata: {name: x}", "leave name and namespace out"),
        ("kind: [", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_patch_that_changes_nothing_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "patch.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        render({"kind": "job", "patch": str(path)})


@pytest.mark.parametrize("run", [None, "runs/a"])
def test_a_run_needs_a_place_in_the_pods(run: str | None) -> None:
    with pytest.raises(ConfigError, match="Give --run-dir with an absolute path there"):
        task_job(RunConfig(task="fashion-mnist", run_dir=run), {}, Kubernetes(), "python")
    spec = task_job(RunConfig(task="fashion-mnist", run_dir="/runs/a"), {}, Kubernetes(), "python")
    assert (spec.run, spec.rank_launcher) == (Path("/runs/a"), "agent")
    assert spec.directory.parent == jobs_directory()


def test_addresses_and_settings_are_no_secrets() -> None:
    render({}, env={"TOKENIZERS_PARALLELISM": "false", "MONKEY": "1"})
