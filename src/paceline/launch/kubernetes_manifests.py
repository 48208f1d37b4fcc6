"""What Kubernetes is asked to run: a training job, or an inference service."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from paceline.core.environment import HOSTS, NODES
from paceline.core.errors import ConfigError
from paceline.launch.launcher import LaunchSpec
from paceline.launch.node import node_command
from paceline.launch.options import KubernetesOptions, parse_claims
from paceline.launch.rendering import refuse_secrets, to_yaml

# --- A job as Kubernetes objects: plain mappings, as they stand in YAML and are sent to the API ---
#
# Each pod is one machine, and runs the node's command. Its index is its rank: Kubernetes numbers the pods of
# an indexed Job, Kubeflow Trainer says the same in torchrun's PET_NODE_RANK. Addresses are the DNS names that
# a headless service gives to pods, so they outlive a pod that is replaced.
#
# The fields are those of batch/v1, jobset.x-k8s.io/v1alpha2 and trainer.kubeflow.org/v1alpha1.


Manifest = dict[str, Any]

CONTAINER = "node"
"""The container's name, and the replicated job's: Kubeflow Trainer looks for it."""

RENDEZVOUS_PORT = 29500
"""Where the first machine listens. Each pod has an address of its own, so jobs do not clash."""

_REPLACED = 6
_STOPPED = 75  # saved after SIGTERM: "run me again"
_USAGE = 2  # the user's mistake: another pod would make it again


def manifests(spec: LaunchSpec, options: KubernetesOptions) -> list[Manifest]:
    """What the job consists of, in the order in which it has to be made; the job itself comes last.

    Raises:
        ConfigError: Kubernetes would refuse a name, or the run would be lost with its pods.
    """
    name = _checked_name(spec, options)
    _check_run(spec, options)
    if spec.nodes[0] < spec.nodes[1] and spec.rank_launcher == "spawn":
        raise ConfigError(
            "--nodes MIN:MAX: machines come and go with --rank-launcher torchrun and tasks, not with spawn."
        )
    refuse_secrets(spec.env, "Keep it in a Kubernetes secret, and give --secret VARIABLE=SECRET/KEY.")
    if options.kind == "trainjob":
        return _train_job(name, spec, options)
    if options.kind == "jobset":
        return [_object("jobset.x-k8s.io/v1alpha2", "JobSet", name, options, _job_set(name, spec, options))]
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": name},
        "ports": [{"name": "rendezvous", "port": _port(spec)}],
    }
    return [
        _object("v1", "Service", name, options, service),
        _object("batch/v1", "Job", name, options, _job(name, spec, options, subdomain=name)),
    ]


def hosts(name: str, kind: str, nodes: int) -> list[str]:
    """The DNS names of all pods, in the order of their ranks."""
    pod = name if kind == "job" else f"{name}-{CONTAINER}-0"
    return [f"{pod}-{index}.{name}" for index in range(nodes)]


def _train_job(name: str, spec: LaunchSpec, options: KubernetesOptions) -> list[Manifest]:
    """A TrainJob, and the runtime that it refers to unless the cluster has one."""
    job_set = _job_set(name, spec, options)
    [replicated] = job_set["replicatedJobs"]
    [container] = replicated["template"]["spec"]["template"]["spec"]["containers"]
    trainer: Manifest = {
        "image": options.image,
        "command": container.pop("command"),
        "numNodes": spec.nodes[0],
        "numProcPerNode": max(spec.nproc),
        "env": container.pop("env"),
    }
    if "resources" in container:
        trainer["resourcesPerNode"] = container.pop("resources")
    if options.runtime is not None:
        body: Manifest = {
            "runtimeRef": {"kind": "ClusterTrainingRuntime", "name": options.runtime},
            "trainer": trainer,
            "runtimePatches": [_patch(options)],
        }
        if spec.walltime_s is not None:
            body["activeDeadlineSeconds"] = int(spec.walltime_s)
        return [_object("trainer.kubeflow.org/v1alpha1", "TrainJob", name, options, body)]
    replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] = "trainer"
    runtime = {"mlPolicy": {"numNodes": spec.nodes[0], "torch": {}}, "template": {"spec": job_set}}
    body = {"runtimeRef": {"kind": "TrainingRuntime", "name": name}, "trainer": trainer}
    return [
        _object("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", name, options, runtime),
        _object("trainer.kubeflow.org/v1alpha1", "TrainJob", name, options, body),
    ]


def _job_set(name: str, spec: LaunchSpec, options: KubernetesOptions) -> Manifest:
    template = {"metadata": {"labels": _labels(name, options)}, "spec": _job(name, spec, options)}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": CONTAINER, "replicas": 1, "template": template}],
    }


def _job(name: str, spec: LaunchSpec, options: KubernetesOptions, subdomain: str | None = None) -> Manifest:
    """An indexed Job: one pod for each machine.

    A pod that is evicted or preempted, or ends saved, is replaced without being counted; one that fails is
    replaced where the others can go on without it, and takes its index and address over.
    """
    least, most = spec.nodes
    rules: list[Manifest] = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": _exit_code(_STOPPED)},
    ]
    # A machine that joins a run just as it ends is refused with the same code, and is right to come again.
    if not (spec.is_task and most > 1):
        rules.append({"action": "FailJob", "onExitCodes": _exit_code(_USAGE)})
    retries = spec.max_restarts or (_REPLACED if spec.is_task else 0)
    job: Manifest = {
        "completionMode": "Indexed",
        "completions": least,
        "parallelism": least,
        "backoffLimit": retries,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
    }
    if spec.walltime_s is not None:
        job["activeDeadlineSeconds"] = int(spec.walltime_s)
    pod = _pod(name, spec, options)
    if subdomain is not None:
        pod["subdomain"] = subdomain
    return {**job, "template": {"metadata": {"labels": _labels(name, options)}, "spec": pod}}


def _exit_code(code: int) -> Manifest:
    return {"containerName": CONTAINER, "operator": "In", "values": [code]}


def _pod(name: str, spec: LaunchSpec, options: KubernetesOptions) -> Manifest:
    container: Manifest = {"name": CONTAINER, "image": options.image, "command": _command(spec)}
    if options.workdir is not None:
        container["workingDir"] = options.workdir
    container["env"] = _env(name, spec, options)
    resources = _resources(spec, options)
    if resources:
        container["resources"] = resources
    container["ports"] = [{"containerPort": _port(spec)}]
    container["volumeMounts"] = _mounts(options)
    return {"restartPolicy": "Never", **_pod_settings(options), "containers": [container]}


def _pod_settings(options: KubernetesOptions) -> Manifest:
    """What a pod has and what a runtime's pod is patched with."""
    settings: Manifest = {"terminationGracePeriodSeconds": options.grace_s()}
    if options.service_account is not None:
        settings["serviceAccountName"] = options.service_account
    if options.selector():
        settings["nodeSelector"] = options.selector()
    # Data loaders and gloo share memory between processes; the default is 64 MiB.
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    for number, claim in enumerate(options.claims()):
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
    return {**settings, "volumes": volumes}


def _mounts(options: KubernetesOptions) -> list[Manifest]:
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, path in enumerate(options.claims().values()):
        mounts.append({"name": f"volume-{number}", "mountPath": path})
    return mounts


def _patch(options: KubernetesOptions) -> Manifest:
    """What a runtime of the cluster's is changed by, for this job."""
    container = {"name": CONTAINER, "volumeMounts": _mounts(options)}
    pod = {"spec": {**_pod_settings(options), "containers": [container]}}
    replicated = {"name": CONTAINER, "template": {"spec": {"template": pod}}}
    template = {"spec": {"replicatedJobs": [replicated]}}
    return {"manager": "paceline/launcher", "trainingRuntimeSpec": {"template": template}}


def _command(spec: LaunchSpec) -> list[str]:
    words = node_command(replace(spec, master_port=_port(spec)))
    # Kubernetes replaces $(NAME) in commands by a variable; $$ is its escape.
    return [word.replace("$(", "$$(") for word in words]


def _env(name: str, spec: LaunchSpec, options: KubernetesOptions) -> list[Manifest]:
    _, most = spec.nodes
    variables = {
        "PYTHONUNBUFFERED": "1",
        NODES: str(most),
        HOSTS: ",".join(hosts(name, options.kind, most)),
        **spec.env,
    }
    env: list[Manifest] = [
        {"name": variable, "value": value.replace("$(", "$$(")} for variable, value in variables.items()
    ]
    for variable, (secret, key) in options.secrets().items():
        reference = {"secretKeyRef": {"name": secret, "key": key}}
        env.append({"name": variable, "valueFrom": reference})
    return env


def _resources(spec: LaunchSpec, options: KubernetesOptions) -> Manifest:
    requests: Manifest = {}
    limits: Manifest = {}
    if spec.cpus_per_task is not None:
        requests["cpu"] = str(spec.cpus_per_task * max(spec.nproc))
    if options.memory is not None:
        requests["memory"] = limits["memory"] = options.memory
    if spec.gpus_per_node:
        limits[options.gpu_resource] = str(spec.gpus_per_node)
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _port(spec: LaunchSpec) -> int:
    return spec.master_port or RENDEZVOUS_PORT


def _labels(name: str, options: KubernetesOptions) -> dict[str, str]:
    own = {"app.kubernetes.io/managed-by": "paceline", "app.kubernetes.io/instance": name}
    return {**own, **options.labels()}


def _object(version: str, kind: str, name: str, options: KubernetesOptions, spec: Manifest) -> Manifest:
    metadata = {"name": name, "namespace": options.namespace, "labels": _labels(name, options)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _checked_name(spec: LaunchSpec, options: KubernetesOptions) -> str:
    """The job's name: unique, since the cluster keeps jobs that have ended."""
    name = spec.directory.name
    longest = hosts(name, options.kind, spec.nodes[1])[-1].partition(".")[0]
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(longest) > 63:
        raise ConfigError(
            f"Kubernetes would refuse a job named {name!r}: a name starts with a letter, has lower-case "
            f"letters, digits and dashes, and is at most {63 - len(longest) + len(name)} characters long. "
            "Give another --name."
        )
    return name


def _check_run(spec: LaunchSpec, options: KubernetesOptions) -> None:
    if spec.run is not None and not options.holds(PurePosixPath(spec.run)):
        mounted = ", ".join(options.claims().values())
        raise ConfigError(
            f"--run-dir {spec.run} is in no volume of the pods, and would be lost with them. Give --volume "
            f"CLAIM:/PATH, and a --run-dir below that path{f'; now mounted: {mounted}' if mounted else ''}."
        )


# --- ``paceline serve --on kserve``: the same server in pods, as an InferenceService of KServe ---
#
# The fields are those of serving.kserve.io/v1beta1: a predictor with a container of one's own, which is
# called kserve-container and says its protocol in the variable PROTOCOL. KServe fetches what STORAGE_URI
# names into /mnt/models before the container starts.


SERVING_PORT = 8080
_FETCHED = "/mnt/models"
_SECRETS = PurePosixPath("/etc/paceline")
_URI = re.compile(r"[a-z][a-z0-9+.-]*://\S+")
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_SECRET_NAME = re.compile(r"([a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)/([A-Za-z0-9._-]+)")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?")
_MARGIN_S = 5


@dataclass(frozen=True, kw_only=True)
class InferenceService:
    """What is to be served in pods, and how.

    Attributes:
        packages: as a pod finds them: below a volume's path; or one URI, which KServe fetches.
        words: of ``paceline serve``, beside packages and address.
        image: has Paceline in it.
        token_secret: SECRET/KEY, where the token that clients send is kept.
        replicas: pods, at least and at most.
        gpus: of each pod; it has as many replicas, or one on a CPU.
        threads: of each replica.
        timeout_s: how long a request may take.
        startup_s: how long a server may take to load a package.
        drain_s: how long a server says "not ready" before it refuses connections.
        name: of the service. Default: the package's last part.
        namespace: of the service.
        volume: CLAIM:/PATH, persistent volume claims and where they are mounted.
        memory: of each pod.
        service_account: that pods run as, for instance to fetch the package.
    """

    packages: tuple[str, ...]
    words: tuple[str, ...]
    image: str
    token_secret: str
    replicas: tuple[int, int]
    gpus: int
    threads: int
    timeout_s: float
    startup_s: float
    drain_s: float
    name: str | None = None
    namespace: str = "default"
    volume: tuple[str, ...] = ()
    memory: str | None = None
    service_account: str | None = None

    def __post_init__(self) -> None:
        claims = parse_claims(self.volume)
        if self.uri is not None and len(self.packages) > 1:
            raise ConfigError(f"KServe fetches one package, {self.uri}. Keep several in a --volume.")
        for place in self.packages if self.uri is None else ():
            path = PurePosixPath(place)
            if not any(path.is_relative_to(mount) for mount in claims.values()) or ".." in path.parts:
                raise ConfigError(
                    f"{place} is nowhere in a pod. Give a package as /PATH in a volume (--volume "
                    "CLAIM:/PATH), or as a URI that KServe fetches, such as s3://bucket/package."
                )
        if not _NAME.fullmatch(self.service_name):
            raise ConfigError(
                f"Kubernetes would refuse a service named {self.service_name!r}: a name starts with a "
                "letter, has lower-case letters, digits and dashes, and at most 63 characters. Give --name."
            )
        if not _NAME.fullmatch(self.namespace):
            raise ConfigError(f"--namespace must be lower-case letters, digits and -, but is {self.namespace!r}.")
        if not _SECRET_NAME.fullmatch(self.token_secret):
            raise ConfigError(
                f"--token-secret must be SECRET/KEY, such as serving/token, but is {self.token_secret!r}. "
                "Make one: kubectl create secret generic serving --from-file=token=FILE"
            )
        if self.memory is not None and not _QUANTITY.fullmatch(self.memory):
            raise ConfigError(f"--memory must be a quantity such as 4Gi, but is {self.memory!r}.")

    @property
    def uri(self) -> str | None:
        """What KServe is to fetch."""
        return next((place for place in self.packages if _URI.fullmatch(place)), None)

    @property
    def service_name(self) -> str:
        """As Kubernetes knows it."""
        return self.name or PurePosixPath(self.packages[0]).name

    @property
    def text(self) -> str:
        """The manifest as ``kubectl apply -f -`` takes it."""
        return to_yaml(self.manifest())

    def manifest(self) -> Manifest:
        """The InferenceService."""
        least, most = self.replicas
        predictor: Manifest = {
            "minReplicas": least,
            "maxReplicas": most,
            "timeout": math.ceil(self.timeout_s),
            # The server drains first: it says so, then answers what it was asked.
            "terminationGracePeriodSeconds": round(self.drain_s + self.timeout_s) + _MARGIN_S,
        }
        if self.service_account is not None:
            predictor["serviceAccountName"] = self.service_account
        secret, key = self.token_secret.split("/")
        # Nobody else may read the file, or the server refuses it.
        volumes: list[Manifest] = [
            {
                "name": "token",
                "secret": {
                    "secretName": secret,
                    "defaultMode": 0o400,
                    "items": [{"key": key, "path": "token"}],
                },
            }
        ]
        mounts: list[Manifest] = [{"name": "token", "mountPath": str(_SECRETS), "readOnly": True}]
        for number, (claim, path) in enumerate(parse_claims(self.volume).items()):
            source = {"claimName": claim, "readOnly": True}
            volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": source})
            mounts.append({"name": f"volume-{number}", "mountPath": path, "readOnly": True})
        predictor["containers"] = [self._container(mounts)]
        predictor["volumes"] = volumes
        return {
            "apiVersion": "serving.kserve.io/v1beta1",
            "kind": "InferenceService",
            "metadata": {
                "name": self.service_name,
                "namespace": self.namespace,
                "labels": {"app.kubernetes.io/managed-by": "paceline"},
                # A Deployment: what Knative makes of pods knows no grace period.
                "annotations": {"serving.kserve.io/deploymentMode": "RawDeployment"},
            },
            "spec": {"predictor": predictor},
        }

    def _container(self, mounts: list[Manifest]) -> Manifest:
        packages: Sequence[str] = self.packages if self.uri is None else (_FETCHED,)
        replicas = (
            "--devices",
            ",".join(f"cuda:{i}" for i in range(self.gpus)),
            "--replicas",
            str(self.gpus),
        )
        words = (
            *("paceline", "serve", *packages, *self.words, *(replicas if self.gpus else ())),
            *("--host", "0.0.0.0", "--port", str(SERVING_PORT), "--token-file", str(_SECRETS / "token")),
        )
        env = [{"name": "PROTOCOL", "value": "v2"}]
        if self.uri is not None:
            env.append({"name": "STORAGE_URI", "value": self.uri})
        # One CPU more, for HTTP.
        requests = {"cpu": str(1 + self.threads * max(self.gpus, 1))}
        limits: Manifest = {"nvidia.com/gpu": str(self.gpus)} if self.gpus else {}
        if self.memory is not None:
            requests["memory"] = limits["memory"] = self.memory
        return {
            "name": "kserve-container",
            "image": self.image,
            # Kubernetes replaces $(NAME) in commands by a variable; $$ is its escape.
            "command": [word.replace("$(", "$$(") for word in words],
            "env": env,
            "ports": [{"name": "http1", "containerPort": SERVING_PORT, "protocol": "TCP"}],
            "readinessProbe": {
                "httpGet": {"path": "/v2/health/ready", "port": SERVING_PORT},
                "periodSeconds": 2,
            },
            # The server listens when its packages are loaded; before that, silence is no fault.
            "startupProbe": {
                "httpGet": {"path": "/v2/health/live", "port": SERVING_PORT},
                "periodSeconds": 2,
                "failureThreshold": math.ceil(self.startup_s * len(self.packages) / 2) + 1,
            },
            "livenessProbe": {
                "httpGet": {"path": "/v2/health/live", "port": SERVING_PORT},
                "periodSeconds": 10,
                "timeoutSeconds": 5,
            },
            "resources": {"requests": requests, **({"limits": limits} if limits else {})},
            "volumeMounts": mounts,
        }
