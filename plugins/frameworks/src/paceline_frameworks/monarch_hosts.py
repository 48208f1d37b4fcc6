"""The hosts that run Monarch's worker loops: by address, or those that Monarch's own job has allocated."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from paceline.core.environment import expand_hosts
from paceline.core.errors import ConfigError, LaunchError
from paceline.core.plugins import install_command
from paceline.launch.slurm import run_slurm
from paceline_kubernetes.api import KubernetesCluster
from paceline_kubernetes.manifests import Manifest

_CONNECT_S = 5.0

_HOST = re.compile(
    r"(?:(?P<service>[^@\s,]+)@)?(?P<scheme>tcp|tls)://(?P<host>\[[0-9a-fA-F:]+\]|[\w.-]+):(?P<port>\d+)"
)


@dataclass(frozen=True)
class MonarchHost:
    """A host that runs Monarch's worker loop.

    Attributes:
        text: its address in Monarch's words: ``tcp://node0:26600``, perhaps with the identity of its service before it.
        of_job: a job of Monarch's starts its worker loop: the address has an identity, without which such a loop
            answers nothing.
    """

    text: str
    scheme: str
    name: str
    port: int
    of_job: bool

    @classmethod
    def parse(cls, text: str) -> MonarchHost:
        match = _HOST.fullmatch(text)
        if match is None or not 0 < int(match["port"]) < 65536:
            raise ConfigError(f"--hosts must be addresses such as tcp://node0:26600, with commas, but has {text!r}.")
        return cls(text, match["scheme"], match["host"].strip("[]"), int(match["port"]), match["service"] is not None)

    def answers(self) -> str:
        """Connect; return why it does not answer, "" if it does."""
        try:
            socket.create_connection((self.name, self.port), timeout=_CONNECT_S).close()
        except OSError as error:
            return str(error)
        return ""


def read_hosts(text: str) -> tuple[MonarchHost, ...]:
    """Read addresses, ``tcp://a:1,tcp://b:1`` or a file with one per line, or ask for the hosts of Monarch's own job.

    ``slurm:JOB`` is a SlurmJob, ``slurm`` the one around this process, ``kubernetes:NAMESPACE/MESH`` a mesh of a
    KubernetesJob.

    Raises:
        ConfigError: the text or the file names no host, one twice, two kinds of connections, or has another form.
        LaunchError: Slurm or Kubernetes has no such job, or it does not run.
    """
    match text.partition(":")[0]:
        case "slurm":
            return _nodes_of_slurm_job(text)
        case "kubernetes":
            return _pods_of_kubernetes_job(text)
    try:
        words = Path(text).read_text(encoding="utf-8").split() if os.path.isfile(text) else text.split(",")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hosts {text}: the file cannot be read: {error}.") from error
    hosts = tuple(MonarchHost.parse(word.strip()) for word in words if word.strip())
    if not hosts:
        raise ConfigError(f"--hosts {text!r} names no host. Give such as tcp://node0:26600,tcp://node1:26600.")
    if len({(host.name, host.port) for host in hosts}) < len(hosts):
        raise ConfigError("--hosts names a host more than once. Each runs one node of the job.")
    if len({host.scheme for host in hosts}) > 1:
        raise ConfigError("--hosts mixes tcp:// and tls://. Monarch connects to all hosts in one way.")
    return hosts


# --- What Monarch's SlurmJob has allocated ---


# Its batch script: the identities of the workers' services by SLURM_NODEID, and the port of all.
_IDENTITIES = re.compile(r"^export MONARCH_SERVICE_PROC_IDS=(.+)$", re.MULTILINE)
_PORT = re.compile(r"(?:tcp://\{socket\.gethostname\(\)\}:|_slurm_batch --port )(\d+)")
_STEP_NODES = re.compile(r"\bNodeList=(\S+)")


def _nodes_of_slurm_job(text: str) -> tuple[MonarchHost, ...]:
    """Return the hosts that a job still has, in the order of its nodes.

    ``squeue --json``, which Monarch reads, has the nodes elsewhere in Slurm 22.05, and all jobs in it.
    """
    job = text.partition(":")[2] or os.environ.get("SLURM_JOB_ID", "")
    if not job.isdigit():
        raise ConfigError(
            f"--hosts {text}: give the number of the SlurmJob, as in slurm:12. Inside of its allocation, slurm will do."
        )
    if shutil.which("squeue") is None:
        raise LaunchError(f"--hosts {text}: there is no squeue here. Give the command where Slurm's commands are.")
    state, _, nodes = run_slurm("squeue", "-h", "-j", job, "-o", "%T %N").stdout.strip().partition(" ")
    if state != "RUNNING":
        raise LaunchError(
            f"--hosts {text}: job {job} is {state}. Wait until it runs: squeue -j {job}"
            if state
            else f"--hosts {text}: Slurm has no such job any more. See: squeue"
        )
    script = run_slurm("scontrol", "write", "batch_script", job, "-").stdout
    identities, port = _IDENTITIES.search(script), _PORT.search(script)
    if identities is None or port is None:
        raise LaunchError(f"--hosts {text}: job {job} is not one of Monarch's SlurmJob. Use --on slurm in it.")
    # The job forgets a node that it has lost; the step of the workers, its first one, has all in their order.
    step = _STEP_NODES.search(run_slurm("scontrol", "-o", "show", "step", f"{job}.0").stdout)
    ranks = expand_hosts(step[1] if step is not None else nodes)
    services = json.loads(shlex.split(identities[1])[0])
    if len(ranks) != len(services):
        raise LaunchError(f"--hosts {text}: job {job} has {len(ranks)} of {len(services)} nodes. Start another one.")
    left = set(expand_hosts(nodes))
    return tuple(
        MonarchHost.parse(f"{service}@tcp://{node}:{port[1]}")
        for node, service in zip(ranks, services, strict=True)
        if node in left
    )


# --- What Monarch's KubernetesJob has allocated ---


_MESH = re.compile(r"kubernetes:(?P<namespace>[a-z0-9-]+)/(?P<mesh>[a-z0-9]+)")
_INDEX = "apps.kubernetes.io/pod-index"
_PODS_PORT = "26600"


def _pods_of_kubernetes_job(text: str) -> tuple[MonarchHost, ...]:
    """Return the pods of a mesh, in their order; those that do not run yet, too, if a StatefulSet has named them."""
    match = _MESH.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--hosts {text}: give the namespace and the mesh of the KubernetesJob, as in kubernetes:team/trainers."
        )
    if importlib.util.find_spec("kubernetes") is None:
        raise LaunchError(f"--hosts {text} needs the kubernetes library. Run: {install_command('kubernetes')}")
    selector = f"app.kubernetes.io/name=monarch-worker,monarch.pytorch.org/mesh-name={match['mesh']}"
    pods = KubernetesCluster(match["namespace"], None).pods(selector)
    ranks = {int(index): pod for pod in pods if (index := pod["metadata"]["labels"].get(_INDEX, "")).isdigit()}
    hosts = [_host_of_pod(pod, rank, match["namespace"]) for rank, pod in sorted(ranks.items())]
    known = tuple(host for host in hosts if host is not None)
    if not hosts or len(known) < len(hosts):
        why = "a pod of this mesh has no address yet" if hosts else "no pod of this mesh is there"
        raise LaunchError(f"--hosts {text}: {why}. Check them: kubectl get pods -n {match['namespace']} -l {selector}")
    return known


def _host_of_pod(pod: Manifest, rank: int, namespace: str) -> MonarchHost | None:
    """Return the address of a pod's worker loop; None where it has no address yet."""
    spec: Manifest = pod["spec"]
    name: str | None = pod["status"].get("podIP")
    if "hostname" in spec and "subdomain" in spec:
        # A pod that replaces this one has the same name, and another IP address.
        name = f"{spec['hostname']}.{spec['subdomain']}.{namespace}.svc"
    if name is None:
        return None
    address = f"tcp://{name}:{_variable_of(pod, 'MONARCH_PORT') or _PODS_PORT}"
    services = _variable_of(pod, "MONARCH_SERVICE_PROC_IDS")
    return MonarchHost.parse(address if services is None else f"{json.loads(services)[rank]}@{address}")


def _variable_of(pod: Manifest, name: str) -> str | None:
    """Return the value of a variable of a pod's containers, as its specification has it."""
    variables = (variable for each in pod["spec"]["containers"] for variable in each.get("env") or ())
    return next((variable.get("value") for variable in variables if variable["name"] == name), None)
