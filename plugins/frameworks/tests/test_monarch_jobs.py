"""``--on monarch`` on the hosts that Monarch's own jobs have allocated.

Its SlurmJob runs on a Slurm cluster; its KubernetesJob with our API server, where the test does what the mesh's
operator, its StatefulSet and the kubelets do.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.elastic.recovery_nodes.runs import OPTIONS, PATIENT, TASK, Run
from tests.lab.kubernetes_api import ApiServer
from tests.lab.machines import Machines, Node, NodeProcess
from tests.lab.slurm_cluster import SlurmCluster

from paceline.core.environment import expand_hosts
from paceline.core.errors import LaunchError
from paceline_frameworks.monarch_hosts import read_hosts

pytestmark = [pytest.mark.monarch, pytest.mark.timeout(300)]

# As its users write it. Slurm's JSON, which Monarch's state() reads, has other fields in the oldest versions.
SLURM_JOB = """
import sys
from monarch.job import SlurmJob
meshes, slurm_args, script = {"nodes": int(sys.argv[1])}, sys.argv[2].split(), sys.argv[3] or None
job = SlurmJob(meshes, python_exe=sys.executable, slurm_args=slurm_args, monarch_port=22333, log_dir="logs")
job.apply(client_script=script)
"""
PLACE = """\
import os
words = [os.uname().nodename, *(os.environ[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK"))]
os.write(1, " ".join(words).encode() + b"\\n")
"""
PACELINE = (sys.executable, "-m", "paceline")


class SlurmJobs:
    """A user of the cluster, who starts jobs of Monarch's."""

    def __init__(self, cluster: SlurmCluster, path: Path) -> None:
        self.cluster = cluster
        self.env = {"XDG_STATE_HOME": str(path / "state"), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        (path / "slurm_job.py").write_text(SLURM_JOB)
        (path / "place.py").write_text(PLACE)

    def apply(self, nodes: int, *slurm_args: str, script: str = "", survives: bool = False) -> str:
        """Start a SlurmJob; return its number. With ``survives``, Slurm lets it continue without a lost node."""
        args = (*slurm_args, "--no-kill") if survives else slurm_args
        env = {**self.env, "SLURM_NO_KILL": "set"} if survives else self.env
        done = self.cluster.run(sys.executable, "slurm_job.py", str(nodes), " ".join(args), script, env=env)
        assert done.returncode == 0, done.stderr
        [job] = [line.split()[2] for line in done.stderr.splitlines() if line.startswith("SLURM job ")]
        return job

    def nodes_of(self, job: str) -> list[Node]:
        """The nodes of a job in Slurm's order, which are any of the cluster's."""
        names = expand_hosts(self.cluster.show(job)["NodeList"])
        return [node for node in self.cluster.nodes if node.name in names]

    def paceline(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.cluster.run(*PACELINE, *arguments, env=self.env)


@pytest.fixture
def slurm_jobs(slurm_cluster: SlurmCluster, tmp_path: Path) -> SlurmJobs:
    return SlurmJobs(slurm_cluster, tmp_path)


@pytest.mark.slurm
def test_a_script_on_the_nodes_of_a_slurm_job(slurm_jobs: SlurmJobs) -> None:
    job = slurm_jobs.apply(2)
    slurm_jobs.cluster.wait_for(job, "RUNNING")
    placed = [f"machine {rank} | {node.name} {rank} 2 {rank}" for rank, node in enumerate(slurm_jobs.nodes_of(job))]
    # Its worker loops still start. They then take the next script.
    for rank_launcher in ("spawn", "torchrun"):
        where = ("--on", "monarch", "--hosts", f"slurm:{job}", "--rank-launcher", rank_launcher)
        done = slurm_jobs.paceline("launch", *where, "--", "place.py")
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == placed
    done = slurm_jobs.paceline("launch", "--on", "monarch", "--hosts", f"slurm:{job}", "--nodes", "3", "--", "place.py")
    assert done.returncode == 2
    assert "--nodes 3 needs as many hosts, but --hosts names 2" in done.stderr
    assert slurm_jobs.cluster.state(job) == "RUNNING"


@pytest.mark.slurm
def test_a_script_inside_of_a_slurm_job_ends_it(slurm_jobs: SlurmJobs, tmp_path: Path) -> None:
    launch = f"{sys.executable} -m paceline launch --on monarch --hosts slurm --rank-launcher spawn --"
    job = slurm_jobs.apply(2, script=f"{launch} place.py")
    slurm_jobs.cluster.wait_for(job, "COMPLETED")
    [output] = (tmp_path / "logs").glob(f"slurm_{job}_*.out")
    placed = [f"machine {rank} | {node.name} {rank} 2 {rank}" for rank, node in enumerate(slurm_jobs.nodes_of(job))]
    assert sorted(output.read_text().splitlines()) == placed
    job = slurm_jobs.apply(2, script=f"{launch} sh -c 'exit 7'")
    slurm_jobs.cluster.wait_for(job, "FAILED")
    assert slurm_jobs.cluster.show(job)["ExitCode"] == "7:0"


@pytest.mark.slurm
def test_a_job_without_worker_loops_is_refused(slurm_jobs: SlurmJobs) -> None:
    def refused(hosts: str, code: int = 1) -> str:
        done = slurm_jobs.paceline("launch", "--on", "monarch", "--hosts", hosts, "--", "place.py")
        assert done.returncode == code
        [line] = done.stderr.splitlines()
        return line

    assert "give the number of the SlurmJob, as in slurm:12" in refused("slurm", code=2)
    assert "Slurm has no such job any more" in refused("slurm:1000000")
    sleeps = slurm_jobs.cluster.sbatch("--wrap", "sleep 600", "-N3", "--exclusive")
    slurm_jobs.cluster.wait_for(sleeps, "RUNNING")
    assert f"job {sleeps} is not one of Monarch's SlurmJob. Use --on slurm" in refused(f"slurm:{sleeps}")
    waits = slurm_jobs.apply(1)
    assert f"job {waits} is PENDING. Wait until it runs: squeue -j {waits}" in refused(f"slurm:{waits}")


@pytest.mark.slurm
@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=pytest.mark.slow)], ids=["a-node", "the-batch-host"])
def test_a_lost_node_of_a_slurm_job_is_replaced(
    slurm_jobs: SlurmJobs, run_processes: Any, wait_until: Callable[..., None], tmp_path: Path, lost: int
) -> None:
    """The job's third node takes its place, and the model is that of one process."""
    cluster = slurm_jobs.cluster
    job = slurm_jobs.apply(3, survives=True)
    cluster.wait_for(job, "RUNNING")
    run = Run(cluster.lab, wait_until, path=tmp_path)
    run.hold(12)
    started = cluster.start(
        *(*PACELINE, "train", "small.py:Small", *OPTIONS, *PATIENT, "--run-dir", "run"),
        *("--on", "monarch", "--nodes", "2", "--hosts", f"slurm:{job}"),
        env=slurm_jobs.env,
    )
    run.wait_for("checkpoint", lambda event: event["step"] == 10, started)
    leader = run.directory.agent.read_text()
    cluster.kill(cluster.nodes[lost])
    run.hold(14)
    if lost == 0:
        run.wait_until(lambda: run.directory.agent.read_text() != leader, "another leader")
    run.wait_for_joiners(1, started, leader=cluster.nodes[1 - lost])
    run.step_until("group", lambda event: event["nodes"] == 2, started)
    run.go_on()
    assert started.wait(120) == 0, started.text
    assert f"machine {lost} ({cluster.nodes[lost].name}) was lost" in started.text
    alone = run_processes.paceline("train", "small.py:Small", *OPTIONS, "--run-dir", "alone", "--json")
    assert run.result()["model_sha256"] == json.loads(alone.stdout.splitlines()[-1])["model_sha256"]
    # Two nodes are left, with their loops; their identities are by the places that they had.
    assert cluster.state(job) == "RUNNING"
    cluster.wait_until(lambda: cluster.show(job)["NumNodes"] == "2", "Slurm to notice")
    done = slurm_jobs.paceline("launch", "--on", "monarch", "--hosts", f"slurm:{job}", "--", "place.py")
    assert done.returncode == 0, done.stderr
    left = [node.name for node in cluster.nodes if node.name != cluster.nodes[lost].name]
    assert sorted(done.stdout.splitlines()) == [f"machine {n} | {name} {n} 2 {n}" for n, name in enumerate(left)]


@pytest.mark.slurm
@pytest.mark.slow
def test_slurm_requeues_a_job_that_has_lost_a_node_and_the_task_in_it_continues(
    slurm_jobs: SlurmJobs, run_processes: Any, wait_until: Callable[..., None], tmp_path: Path
) -> None:
    cluster = slurm_jobs.cluster
    run = Run(cluster.lab, wait_until, path=tmp_path)
    run.hold(12)
    train = f"{sys.executable} -m paceline train small.py:Small --run-dir run --on monarch --hosts slurm"
    job = slurm_jobs.apply(2, script=" ".join([train, *OPTIONS, *PATIENT]))
    run.wait_for("checkpoint", lambda event: event["step"] == 10)
    cluster.kill(slurm_jobs.nodes_of(job)[1])
    cluster.wait_until(lambda: cluster.show(job)["Restarts"] == "1", "the restart")
    run.go_on()
    cluster.wait_for(job, "COMPLETED")
    alone = run_processes.paceline("train", "small.py:Small", *OPTIONS, "--run-dir", "alone", "--json")
    assert run.result()["model_sha256"] == json.loads(alone.stdout.splitlines()[-1])["model_sha256"]


# A KubernetesJob


# As its users write it; the program ends, and the pods stay.
KUBERNETES_JOB = """
import sys
from monarch.job.kubernetes import ImageSpec, KubeConfig, KubernetesJob
job = KubernetesJob("team", kubeconfig=KubeConfig.from_path(sys.argv[1]))
job.add_mesh("trainers", 2, image_spec=ImageSpec("ghcr.io/meta-pytorch/monarch:latest"))
job.apply()
"""
LABELS = {"app.kubernetes.io/name": "monarch-worker", "monarch.pytorch.org/mesh-name": "trainers"}


class MeshPods:
    """Does what the mesh's operator and the kubelets do: makes the pods, and runs their containers' commands."""

    def __init__(self, server: ApiServer, control: Node) -> None:
        self._server = server
        self._hosts = control.lab.hosts
        self._names = self._hosts.read_text()
        self._addresses: dict[str, str] = {}
        self.control = control
        self.config = server.kubeconfig(self._hosts.with_name("kubeconfig"))

    def start(self, index: int, node: Node) -> NodeProcess:
        """Make a pod, as a StatefulSet of Kubernetes 1.28 or later does, and run its container on a machine."""
        template = self._server.the("monarchmeshes")["spec"]["podTemplate"]["spec"]
        labels = {**LABELS, "apps.kubernetes.io/pod-index": str(index)}
        spec = {**template, "hostname": f"trainers-{index}", "subdomain": "trainers-svc"}
        self._server.set_pod(f"trainers-{index}", labels, spec=spec, podIP=node.address)
        self._addresses[f"trainers-{index}.trainers-svc.team.svc"] = node.address
        # In place: the machines have this very file.
        self._hosts.write_text(self._names + "".join(f"{ip} {name}\n" for name, ip in self._addresses.items()))
        [container] = template["containers"]
        python, *words = container["command"]
        assert python == "python"
        env = {variable["name"]: self._value(variable, labels) for variable in container["env"]}
        return node.start([sys.executable, *words], env=env)

    def _value(self, variable: Mapping[str, Any], labels: Mapping[str, str]) -> str:
        if "value" in variable:
            return str(variable["value"])
        field = variable["valueFrom"]["fieldRef"]["fieldPath"]
        return labels[field.removeprefix("metadata.labels['").removesuffix("']")]


@pytest.fixture
def mesh_pods(machines: Machines) -> Iterator[MeshPods]:
    """A KubernetesJob without its pods yet; the first machine has the API server."""
    control = machines(4)[0]
    server = start_in(control, lambda: ApiServer(control.address))
    try:
        pods = MeshPods(server, control)
        done = control.run([sys.executable, "-c", KUBERNETES_JOB, pods.config])
        assert done.returncode == 0, done.stderr
        yield pods
    finally:
        server.end()


def start_in(node: Node, make: Callable[[], Any]) -> Any:
    """Call a function in a thread that is in the machine's network; sockets that it makes stay there."""

    def enter() -> Any:
        with Path(f"/proc/{node.pid}/ns/net").open() as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        return make()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(enter).result()


@pytest.mark.k8s
def test_pods_of_no_stateful_set_are_known_by_their_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ApiServer()
    try:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
        for index in (10, 9):
            port = {"name": "MONARCH_PORT", "value": "26700"}
            spec = {"containers": [{"name": "sidecar"}, {"name": "worker", "env": [port] if index == 9 else []}]}
            labels = {**LABELS, "apps.kubernetes.io/pod-index": str(index)}
            server.set_pod(f"own-{index}", labels, spec=spec, podIP=f"10.0.0.{index}")
        server.set_pod("without-index", LABELS, spec=spec, podIP="10.0.0.99")
        hosts = read_hosts("kubernetes:team/trainers")
        assert [host.text for host in hosts] == ["tcp://10.0.0.9:26700", "tcp://10.0.0.10:26600"]
        server.set_pod("own-11", {**labels, "apps.kubernetes.io/pod-index": "11"}, spec=spec, phase="Pending")
        with pytest.raises(LaunchError, match="a pod of this mesh has no address yet"):
            read_hosts("kubernetes:team/trainers")
    finally:
        server.end()


MESH = ("--on", "monarch", "--hosts", "kubernetes:team/trainers")


@pytest.mark.k8s
def test_a_script_on_the_pods_of_a_kubernetes_job(mesh_pods: MeshPods, tmp_path: Path) -> None:
    control, *nodes = mesh_pods.control.lab.nodes
    (control.lab.directory / "place.py").write_text(PLACE)
    env = {"KUBECONFIG": str(mesh_pods.config), "XDG_STATE_HOME": str(tmp_path / "state")}
    launch = (*PACELINE, "launch", *MESH, "--rank-launcher", "spawn", "--", "place.py")
    done = control.run(launch, env=env)
    assert done.returncode == 1
    assert "no pod of this mesh is there. Check them: kubectl get pods -n team -l app" in done.stderr
    for index, node in ((1, nodes[0]), (0, nodes[1])):
        mesh_pods.start(index, node)
    # The worker loops still start.
    done = control.run(launch, env=env)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["machine 0 | node2 0 2 0", "machine 1 | node1 1 2 1"]


@pytest.mark.slow
@pytest.mark.k8s
def test_a_lost_pod_of_a_kubernetes_job_is_replaced(
    mesh_pods: MeshPods, run_processes: Any, wait_until: Callable[..., None], tmp_path: Path
) -> None:
    """Its StatefulSet makes it again, under its name, and at another address; the model is that of one process."""
    control, *nodes = mesh_pods.control.lab.nodes
    for index in (0, 1):
        mesh_pods.start(index, nodes[index])
    run = Run(control.lab, wait_until)
    run.hold(12)
    started = control.start(
        [*PACELINE, "train", "small.py:Small", *OPTIONS, *PATIENT, "--run-dir", "run", *MESH],
        env={"KUBECONFIG": str(mesh_pods.config), "TORCH_CPP_LOG_LEVEL": "ERROR"},
    )
    run.wait_for("checkpoint", lambda event: event["step"] == 10, started)
    nodes[1].kill()
    run.hold(14)
    wait_until(lambda: f"machine 1 ({nodes[1].name}) was lost" in started.text, "Monarch's report", timeout_s=90)
    mesh_pods.start(1, nodes[2])
    run.wait_for_joiners(1, started, leader=nodes[0])
    run.step_until("group", lambda event: event["nodes"] == 2, started)
    run.go_on()
    assert started.wait(120) == 0, started.text
    (tmp_path / "small.py").write_text(TASK)
    alone = run_processes.paceline("train", "small.py:Small", *OPTIONS, "--run-dir", "alone", "--json")
    assert run.result()["model_sha256"] == json.loads(alone.stdout.splitlines()[-1])["model_sha256"]
