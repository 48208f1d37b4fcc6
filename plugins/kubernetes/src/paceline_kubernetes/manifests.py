"""Kubernetes manifests of training jobs and inference services."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from paceline.core.environment import HOSTS, NODES
from paceline.core.errors import RESTART_EXIT_CODE, ConfigError
from paceline.core.options import require_form
from paceline.launch.launcher import LaunchSpec
from paceline.launch.node import node_command
from paceline.launch.rendering import refuse_secrets, to_yaml
from paceline_kubernetes.options import NAMESPACE, QUANTITY, KubernetesOptions, parse_claims
from paceline_kubernetes.patches import apply_patches

# --- A training job as Kubernetes objects: plain mappings, as in YAML and in API requests ---
#
# Each pod is one node, and runs the node's command. Its index is its rank: Kubernetes numbers the pods of an
# indexed Job, and Kubeflow Trainer sets torchrun's PET_NODE_RANK accordingly. Addresses are the DNS names of pods
# from a headless service, so they stay valid when a pod is replaced.
#
# The fields are those of batch/v1, jobset.x-k8s.io/v1alpha2 and trainer.kubeflow.org/v1alpha1.


Manifest = dict[str, Any]

CONTAINER = "node"
"""Name of the container and of the replicated job, which Kubeflow Trainer requires."""

RENDEZVOUS_PORT = 29500
"""Port of the first node. Each pod has its own address, so jobs do not conflict."""

_MAX_REPLACED = 6
_USAGE_EXIT_CODE = 2  # a usage error, which another pod would repeat


def manifests(spec: LaunchSpec, options: KubernetesOptions) -> list[Manifest]:
    """Return the job's objects in the order of their creation; the job itself is last."""
    name = _check_name(spec, options)
    _check_run(spec, options)
    if spec.nodes[0] < spec.nodes[1] and spec.rank_launcher == "spawn":
        raise ConfigError(
            "--nodes MIN:MAX needs --rank-launcher torchrun or a task: nodes cannot join or leave with spawn."
        )
    objects = _objects(name, spec, options)
    return objects if options.patch is None else apply_patches(objects, Path(options.patch))


def _objects(name: str, spec: LaunchSpec, options: KubernetesOptions) -> list[Manifest]:
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
    """Return the DNS names of all pods, ordered by rank."""
    pod = name if kind == "job" else f"{name}-{CONTAINER}-0"
    return [f"{pod}-{index}.{name}" for index in range(nodes)]


def _train_job(name: str, spec: LaunchSpec, options: KubernetesOptions) -> list[Manifest]:
    """Return a TrainJob, and its runtime unless the cluster provides one."""
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
    """Return an indexed Job with one pod per node.

    A pod that is evicted or preempted, or that ends after saving, is replaced without counting. A failed pod is
    replaced if the others can continue without it; the new pod takes its index and address.
    """
    least, most = spec.nodes
    rules: list[Manifest] = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": _exit_code(RESTART_EXIT_CODE)},
    ]
    # A node that joins a run just as it ends exits with the same code, and may be retried.
    if not (spec.is_task and most > 1):
        rules.append({"action": "FailJob", "onExitCodes": _exit_code(_USAGE_EXIT_CODE)})
    retries = spec.recovery.max_restarts or (_MAX_REPLACED if spec.is_task else 0)
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
    container |= _container_settings(options)
    return {"restartPolicy": "Never", **_pod_settings(options), "containers": [container]}


def _pod_settings(options: KubernetesOptions) -> Manifest:
    """Return the settings of a pod, also used to patch a runtime's pod."""
    settings: Manifest = {"terminationGracePeriodSeconds": options.grace_s()}
    if options.service_account is not None:
        settings["serviceAccountName"] = options.service_account
    if options.selector():
        settings["nodeSelector"] = options.selector()
    if options.tolerations():
        settings["tolerations"] = options.tolerations()
    if options.priority_class is not None:
        settings["priorityClassName"] = options.priority_class
    if options.image_pull_secret:
        settings["imagePullSecrets"] = [{"name": name} for name in options.image_pull_secret]
    if options.host_network:
        settings |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}  # else pods' names are unknown
    # Data loaders and gloo use shared memory between processes; the default is 64 MiB.
    volumes: list[Manifest] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if ids := options.user_ids():
        settings["automountServiceAccountToken"] = False
        settings["securityContext"] = {
            "runAsNonRoot": True,
            "runAsUser": ids[0],
            "runAsGroup": ids[1],
            "fsGroup": ids[1],
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        volumes.append({"name": "tmp", "emptyDir": {}})
    for number, claim in enumerate(options.claims()):
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
    return {**settings, "volumes": volumes}


def _container_settings(options: KubernetesOptions) -> Manifest:
    """Return the settings of a pod's container, also used to patch a runtime's."""
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    settings: Manifest = {"volumeMounts": mounts}
    if options.user is not None:
        mounts.append({"name": "tmp", "mountPath": "/tmp"})
        settings["securityContext"] = {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        }
    for number, path in enumerate(options.claims().values()):
        mounts.append({"name": f"volume-{number}", "mountPath": path})
    return settings


def _patch(options: KubernetesOptions) -> Manifest:
    """Return the changes of the cluster's runtime for this job."""
    container = {"name": CONTAINER, **_container_settings(options)}
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
        **({} if options.user is None else {"HOME": "/tmp"}),
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
    limits |= options.resources()
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _port(spec: LaunchSpec) -> int:
    return spec.master_port or RENDEZVOUS_PORT


def _labels(name: str, options: KubernetesOptions) -> dict[str, str]:
    own = {"app.kubernetes.io/managed-by": "paceline", "app.kubernetes.io/instance": name}
    return {**own, **options.labels()}


def _object(version: str, kind: str, name: str, options: KubernetesOptions, spec: Manifest) -> Manifest:
    metadata = {"name": name, "namespace": options.namespace, "labels": _labels(name, options)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _check_name(spec: LaunchSpec, options: KubernetesOptions) -> str:
    """Check the job's name, which must be unique since the cluster keeps ended jobs."""
    name = spec.directory.name
    longest = hosts(name, options.kind, spec.nodes[1])[-1].partition(".")[0]
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(longest) > 63:
        raise ConfigError(
            f"the job name {name!r} is not valid in Kubernetes: it must start with a letter, consist of lower-case "
            f"letters, digits and dashes, and have at most {63 - len(longest) + len(name)} characters. "
            "Give another --name."
        )
    return name


def _check_run(spec: LaunchSpec, options: KubernetesOptions) -> None:
    if spec.run is not None and not options.holds(PurePosixPath(spec.run)):
        mounted = ", ".join(options.claims().values())
        raise ConfigError(
            f"--run-dir {spec.run} is not in a volume of the pods, so the run would be lost with them. Give --volume "
            f"CLAIM:/PATH, and a --run-dir below that path{f'; now mounted: {mounted}' if mounted else ''}."
        )


# --- ``paceline serve --on kserve``: the server in pods, as an InferenceService of KServe ---
#
# The fields are those of serving.kserve.io/v1beta1: a predictor with a custom container, which must be named
# kserve-container and give its protocol in the variable PROTOCOL. KServe downloads STORAGE_URI into /mnt/models
# before the container starts.


SERVING_PORT = 8080
_DOWNLOADS = "/mnt/models"
_SECRETS = PurePosixPath("/etc/paceline")
_URI = re.compile(r"[a-z][a-z0-9+.-]*://\S+")
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_SECRET_NAME = re.compile(r"([a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)/([A-Za-z0-9._-]+)")
_MARGIN_S = 5


@dataclass(frozen=True, kw_only=True)
class InferenceService:
    """A server in pods.

    Attributes:
        packages: paths in a pod, below a volume's path; or one URI, which KServe downloads.
        words: further arguments of ``paceline serve``.
        token_secret: SECRET/KEY of the token that clients send.
        replicas: smallest and largest number of pods.
        gpus: per pod, with one replica each; without GPUs, one replica on a CPU.
        timeout_s: time limit of a request.
        startup_s: time limit for loading a package.
        drain_s: how long a server reports "not ready" before it refuses connections.
        name: of the service. Default: the last part of the package's.
        volume: CLAIM:/PATH, persistent volume claims and their mount points.
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
            raise ConfigError(f"KServe downloads only one package, {self.uri}. Put several packages into a --volume.")
        for package in self.packages if self.uri is None else ():
            path = PurePosixPath(package)
            if not any(path.is_relative_to(mount) for mount in claims.values()) or ".." in path.parts:
                raise ConfigError(
                    f"{package} does not exist in a pod. Give a package as /PATH in a volume (--volume "
                    "CLAIM:/PATH), or as a URI that KServe downloads, such as s3://bucket/package."
                )
        if not _NAME.fullmatch(self.service_name):
            raise ConfigError(
                f"the service name {self.service_name!r} is not valid in Kubernetes: it must start with a letter, "
                "consist of lower-case letters, digits and dashes, and have at most 63 characters. Give --name."
            )
        require_form("--namespace", NAMESPACE, self.namespace, "lower-case letters, digits and -")
        if not _SECRET_NAME.fullmatch(self.token_secret):
            raise ConfigError(
                f"--token-secret must be SECRET/KEY, such as serving/token, but is {self.token_secret!r}. "
                "Create one: kubectl create secret generic serving --from-file=token=FILE"
            )
        if self.memory is not None:
            require_form("--memory", QUANTITY, self.memory, "a quantity such as 4Gi")

    @property
    def uri(self) -> str | None:
        return next((package for package in self.packages if _URI.fullmatch(package)), None)

    @property
    def service_name(self) -> str:
        return self.name or PurePosixPath(self.packages[0]).name

    @property
    def text(self) -> str:
        """Return the manifest for ``kubectl apply -f -``."""
        return to_yaml(self.manifest())

    def manifest(self) -> Manifest:
        least, most = self.replicas
        predictor: Manifest = {
            "minReplicas": least,
            "maxReplicas": most,
            "timeout": math.ceil(self.timeout_s),
            # The server drains first: it reports not ready, then answers the accepted requests.
            "terminationGracePeriodSeconds": round(self.drain_s + self.timeout_s) + _MARGIN_S,
        }
        if self.service_account is not None:
            predictor["serviceAccountName"] = self.service_account
        secret, key = self.token_secret.split("/")
        # The server refuses a token file that others can read.
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
                # A plain Deployment, because Knative's pods have no grace period.
                "annotations": {"serving.kserve.io/deploymentMode": "RawDeployment"},
            },
            "spec": {"predictor": predictor},
        }

    def _container(self, mounts: list[Manifest]) -> Manifest:
        packages: Sequence[str] = self.packages if self.uri is None else (_DOWNLOADS,)
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
        # One more CPU, for HTTP.
        requests = {"cpu": str(1 + self.threads * max(self.gpus, 1))}
        limits: Manifest = {"nvidia.com/gpu": str(self.gpus)} if self.gpus else {}
        if self.memory is not None:
            requests["memory"] = limits["memory"] = self.memory
        return {
            "name": "kserve-container",
            "image": self.image,
            # Kubernetes replaces $(NAME) in commands by a variable; $$ escapes it.
            "command": [word.replace("$(", "$$(") for word in words],
            "env": env,
            "ports": [{"name": "http1", "containerPort": SERVING_PORT, "protocol": "TCP"}],
            "readinessProbe": {
                "httpGet": {"path": "/v2/health/ready", "port": SERVING_PORT},
                "periodSeconds": 2,
            },
            # The server listens only after its packages are loaded, so probes may fail until then.
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
