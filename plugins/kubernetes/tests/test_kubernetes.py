"""``--on kubernetes``: submitted to an API server, followed, resized and ended; and what the pods then do."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.lab.kubernetes_api import NAMESPACE, ApiServer

from paceline.core.errors import ConfigError, LaunchError
from paceline.launch.job_records import JobRecord, add_record, find_record
from paceline.launch.launcher import JobStatus, LaunchSpec
from paceline_kubernetes.api import KubernetesJob
from paceline_kubernetes.launcher import Kubernetes
from paceline_kubernetes.options import KubernetesOptions
from paceline_pages.jobs_command import cancel

pytestmark = pytest.mark.k8s

JOB_LABEL = {"batch.kubernetes.io/job-name": "t-1"}
SET_LABEL = {"jobset.sigs.k8s.io/jobset-name": "t-1"}
PLURAL = {"job": "jobs", "jobset": "jobsets", "trainjob": "trainjobs"}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    server = ApiServer()
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    try:
        yield server
    finally:
        server.end()


def submit(kind: str = "job", *, nodes: tuple[int, int] = (2, 2), **options: Any) -> KubernetesJob:
    spec = LaunchSpec(
        command=("python", "train.py"),
        name="t",
        directory=Path("/state/t-1"),
        nodes=nodes,
        python="python",
    )
    chosen = KubernetesOptions(**{"kind": kind, "image": "train:1", "namespace": NAMESPACE, **options})
    job = Kubernetes().submit(Kubernetes().render(spec, chosen))
    assert isinstance(job, KubernetesJob)
    return job


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_a_job_from_its_submission_to_its_end(api: ApiServer, kind: str) -> None:
    job = submit(kind)
    main = api.the(PLURAL[kind])
    for (plural, _), kept in api.objects.items():
        if plural != PLURAL[kind]:
            [owner] = kept["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["uid"]) == (main["kind"], main["metadata"]["uid"])
    assert (job.status().state, job.status().detail) == ("pending", "no pods yet")

    again = Kubernetes().reopen(json.loads(json.dumps(job.reference)))
    label = JOB_LABEL if kind == "job" else SET_LABEL
    unschedulable = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "no GPU",
    }
    api.set_pod("t-1-0-x", label, phase="Pending", conditions=[unschedulable])
    assert (again.status().state, again.status().detail) == ("pending", "Unschedulable: no GPU")
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    api.set_pod("t-1-0-x", label, phase="Pending", containerStatuses=[{"name": "node", "state": waiting}])
    assert again.status().detail == "ImagePullBackOff: no such image"
    assert list(again.logs()) == []

    api.set_pod("t-1-0-x", label)
    api.set_pod("t-1-1-x", label, index=1)
    assert (again.status().state, again.status().detail) == ("running", "2 pod(s)")
    api.write_log("t-1-1-x", ["second"])
    api.write_log("t-1-0-x", ["first", "ünfinished"])
    assert list(again.logs()) == ["node-0 | first", "node-0 | ünfinished", "node-1 | second"]

    api.set_condition(PLURAL[kind], "Complete" if kind != "jobset" else "Completed")
    assert again.status().state == "succeeded"
    assert again.wait() == 0
    again.cancel()
    assert {plural for plural, _ in api.objects} == {"pods"}, "what a job owns goes with it"
    assert again.status().state == "cancelled"
    again.cancel()  # nothing happens


def test_logs_are_followed_until_the_job_fails(
    api: ApiServer, capfd: pytest.CaptureFixture[str], wait_until: Callable[..., None]
) -> None:
    job = submit()
    api.set_pod("t-1-0-x", JOB_LABEL)
    api.write_log("t-1-0-x", ["one"])
    printed: list[str] = []
    reader = threading.Thread(target=lambda: printed.extend(job.logs(follow=True)), daemon=True)
    reader.start()
    wait_until(lambda: any(path.endswith("t-1-0-x/log") for _, path in api.requests), "the log is read")
    api.write_log("t-1-0-x", ["two"], ended=True)
    api.write_log("t-1-1-x", [])
    api.set_pod("t-1-1-x", JOB_LABEL, index=1)
    wait_until(lambda: any(path.endswith("t-1-1-x/log") for _, path in api.requests), "a later pod is found")
    ends = [
        {
            "name": "node",
            "state": {"terminated": {"exitCode": code, "finishedAt": f"2026-01-01T00:00:0{second}Z"}},
        }
        for code, second in ((1, 2), (7, 1))
    ]
    for index, end in enumerate(ends):
        api.set_pod(f"t-1-{index}-x", JOB_LABEL, index=index, phase="Failed", containerStatuses=[end])
    api.write_log("t-1-1-x", ["last words"], ended=True)
    api.set_condition("jobs", "Failed", reason="BackoffLimitExceeded", message="too many")
    reader.join(30)
    assert not reader.is_alive()
    assert sorted(printed) == ["node-0 | one", "node-0 | two", "node-1 | last words"]
    status = job.status()
    assert (status.state, status.exit_code, status.restarts) == ("failed", 7, 1)
    assert job.wait() == 7
    assert "Job t-1 failed: BackoffLimitExceeded: too many" in capfd.readouterr().err


def test_the_command_line(api: ApiServer, run_processes: Any) -> None:
    options = ("--on", "kubernetes", "--kind", "job", "--image", "train:1", "--namespace", NAMESPACE)
    submitted = run_processes.paceline(
        *("train", "fashion-mnist", *options, "--nodes", "1:2", "--volume", "runs:/runs", "--run-dir", "/runs/a"),
        "--json",
    )
    assert submitted.returncode == 0, submitted.stderr
    record = json.loads(submitted.stdout)
    name = record["reference"]["id"]
    assert (record["id"], record["run"]) == (f"kubernetes-{name}", "/runs/a")
    assert not Path("/runs").exists(), "a path in the pods is none here"
    command = api.the("jobs")["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[command.index("--") + 1 :] == [
        *("python", "-m", "paceline", "train", "fashion-mnist", "--run-dir", "/runs/a")
    ]
    api.set_pod("p", {"batch.kubernetes.io/job-name": name})
    listed = json.loads(run_processes.paceline("jobs", "--json").stdout)
    assert [job["status"]["state"] for job in listed] == ["running"]
    scaled = run_processes.paceline("scale", name, "--nodes", "2")
    assert scaled.returncode == 0, scaled.stderr
    assert api.the("jobs")["spec"]["parallelism"] == 2
    assert run_processes.paceline("cancel", name).returncode == 0
    assert ("jobs", name) not in api.objects
    ended = run_processes.paceline("status", name, "--json")
    assert json.loads(ended.stdout)["status"]["state"] == "cancelled"


@pytest.mark.parametrize(
    ("kind", "elastic", "changed"),
    [
        ("job", True, "jobs"),
        ("jobset", True, "jobsets"),
        ("jobset", False, "jobs"),
        ("trainjob", False, "jobs"),
    ],
)
def test_a_job_is_resized(api: ApiServer, kind: str, elastic: bool, changed: str) -> None:
    job = submit(kind, nodes=(1, 3))
    api.elastic = elastic
    if kind != "job":  # what JobSet's controller and Trainer's make
        template = api.the("jobsets" if kind == "jobset" else "trainingruntimes")["spec"]
        template = template if kind == "jobset" else template["template"]["spec"]
        metadata = {"name": "t-1-node-0", "labels": {}}
        inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata}
        api.objects["jobs", "t-1-node-0"] = {
            **inner,
            **template["replicatedJobs"][0]["template"],
            "metadata": metadata,
        }
        if kind == "trainjob":
            made = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "t-1"}}
            api.objects["jobsets", "t-1"] = {**made, "spec": template}
    job.scale(3)
    resized = api.the(changed)["spec"]
    if changed == "jobsets":
        resized = resized["replicatedJobs"][0]["template"]["spec"]
    assert (resized["parallelism"], resized["completions"]) == (3, 3)
    for wrong in (0, 4):
        with pytest.raises(ConfigError, match=f"--nodes {wrong}: must be within the --nodes 1:3"):
            job.scale(wrong)


@pytest.mark.parametrize(
    ("trouble", "kind", "message"),
    [
        ("forbidden", "job", r'cannot create resource "jobs".*Request the permission'),
        ("not installed", "trainjob", r"could not find.*Install Kubeflow Trainer.*--kind jobset"),
        ("not installed", "jobset", r"could not find.*Install JobSet in the cluster.*--kind job"),
        ("the same name", "job", r'services "t-1" already exists. Give another --name'),
        ("a wrong token", "job", r"Unauthorized. Log in to the cluster again"),
        ("another namespace", "job", r"forbidden.*choose another --namespace"),
        ("a wrong context", "job", r"no Kubernetes cluster is configured.*--context elsewhere"),
    ],
)
def test_a_refusal_is_passed_on_and_leaves_nothing(
    api: ApiServer, tmp_path: Path, trouble: str, kind: str, message: str
) -> None:
    options: dict[str, Any] = {}
    kept = 0
    match trouble:
        case "forbidden":
            api.forbidden.add(("create", "jobs"))
        case "not installed":
            api.without.add(PLURAL[kind])
        case "the same name":
            submit(kind)
            kept = len(api.objects)
        case "a wrong token":
            api.kubeconfig(tmp_path / "kubeconfig", token="of-yesterday")
        case "another namespace":
            options["namespace"] = "others"
        case "a wrong context":
            options["context"] = "elsewhere"
    with pytest.raises(LaunchError, match=message):
        submit(kind, **options)
    assert len(api.objects) == kept


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_a_job_that_was_made_is_found_though_the_answer_was_lost(api: ApiServer, kind: str) -> None:
    api.silent.update(("services", "trainingruntimes", PLURAL[kind]))
    job = submit(kind)
    main = api.the(PLURAL[kind])
    assert job.status().state == "pending"
    for (plural, _), kept in api.objects.items():
        if plural != PLURAL[kind]:
            assert kept["metadata"]["ownerReferences"][0]["uid"] == main["metadata"]["uid"]


def test_what_may_have_been_made_is_deleted(api: ApiServer) -> None:
    api.silent.add("jobs")
    api.forbidden.add(("get", "jobs"))
    with pytest.raises(LaunchError, match="cannot be reached"):
        submit()
    assert not api.objects
    api.forbidden.add(("delete", "jobs"))
    with pytest.raises(LaunchError, match=r"kubectl delete --ignore-not-found --namespace team --context lab job/t-1$"):
        submit()
    assert [plural for plural, _ in api.objects] == ["jobs"]


@pytest.mark.parametrize("plural", ["services", "jobs"])
def test_nothing_is_left_after_ctrl_c_while_an_object_is_made(api: ApiServer, plural: str) -> None:
    api.interrupting.add(plural)
    with pytest.raises(KeyboardInterrupt):
        submit()
    assert not api.objects
    made = [path for method, path in api.requests if method == "POST"]
    assert len(made) == (1 if plural == "services" else 2)


def test_a_job_is_asked_about_where_it_is(api: ApiServer, tmp_path: Path) -> None:
    """Also after another context has become the current one, or the context another cluster's."""
    kubeconfig = tmp_path / "kubeconfig"
    other = ApiServer()
    try:
        here = yaml.safe_load(kubeconfig.read_text())
        there = yaml.safe_load(other.kubeconfig(tmp_path / "other").read_text())
        there["clusters"][0]["name"] = there["contexts"][0]["context"]["cluster"] = "other"
        there["contexts"][0]["name"] = "other"
        both = {**here, **{part: here[part] + there[part] for part in ("clusters", "contexts")}}

        job = submit()
        kubeconfig.write_text(yaml.safe_dump({**both, "current-context": "other"}))
        assert remembered(job.reference).status().state == "pending"

        kubeconfig.write_text(other.kubeconfig(tmp_path / "other").read_text())
        record = remembered(job.reference)
        assert record.status().state == "unknown"
        assert record.status().detail == f"it was submitted to {api.url}, and {other.url} has no Job t-1"
        assert find_record("t-1").ended is None
        with pytest.raises(LaunchError, match=r"was submitted to .* Set KUBECONFIG"):
            cancel("t-1")
        assert ("jobs", "t-1") in api.objects

        # What was recorded before the context and the server were, and taken for cancelled then.
        earlier = {**job.reference, "context": None}
        del earlier["server"]
        record = remembered(earlier)
        assert record.status().detail == f"{other.url} has no Job t-1, but another may have it"
        gone = JobStatus(state="cancelled", detail="the cluster has no Job t-1 any more")
        remembered(earlier, ended=asdict(gone))
        cancel("t-1")
        assert find_record("t-1").ended is not None
        kubeconfig.write_text(yaml.safe_dump(here))
        cancel("t-1")
        assert ("jobs", "t-1") not in api.objects
    finally:
        other.end()


def remembered(reference: dict[str, Any], ended: dict[str, Any] | None = None) -> JobRecord:
    place: Any = {"name": "t-1", "command": ("python",), "directory": "/state/t-1"}
    record = JobRecord(id="kubernetes-t-1", launcher="kubernetes", reference=reference, ended=ended, **place)
    add_record(record)
    return record


def test_a_server_that_is_not_there(api: ApiServer) -> None:
    job = submit()
    api.end()
    with pytest.raises(LaunchError, match=r"http://127.0.0.1:\d+ cannot be reached.*kubectl cluster-info"):
        submit()
    with pytest.raises(LaunchError, match="cannot be reached"):
        KubernetesJob(job.reference).status()


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(LaunchError, match=r"pip install 'kubeflow-trainer-api<\S+ 'kubernetes<"):
        submit()


SUM = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
os.write(1, f"{dist.get_world_size()} {int(total)}\\n".encode())
dist.destroy_process_group()
"""


def test_a_script_in_the_pods_of_a_train_job(run_processes: Any, tmp_path: Path) -> None:
    """Kubeflow's variables are torchrun's own defaults; the manifest's command overrides them."""
    (tmp_path / "sum.py").write_text(SUM)
    spec = LaunchSpec(
        command=(sys.executable, "sum.py"),
        name="t",
        directory=Path("/state/t-1"),
        nodes=(2, 2),
        nproc=(2,),
        python=sys.executable,
        master_port=run_processes.free_port(),
    )
    job = Kubernetes().render(spec, KubernetesOptions(image="train:1")).request[-1]["spec"]["trainer"]
    pods = []
    for index in ("0", "1"):
        env = {variable["name"]: variable["value"] for variable in job["env"]}
        env |= {"PACELINE_HOSTS": "127.0.0.1,127.0.0.1"}  # what DNS says
        env |= {"PET_NODE_RANK": index, "PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"}
        env |= {"PET_MASTER_ADDR": "t-1-node-0-0.t-1", "PET_MASTER_PORT": "29400"}
        pods.append(run_processes.start(job["command"], env=env))
    done = [run_processes.finish(pod, timeout_s=100) for pod in pods]
    assert [pod.returncode for pod in done] == [0, 0], done[0].stderr
    assert "".join(pod.stdout for pod in done).splitlines() == ["4 10"] * 4
