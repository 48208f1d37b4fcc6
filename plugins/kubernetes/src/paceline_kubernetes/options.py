"""The options of ``--on kubernetes``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from paceline.core.errors import ConfigError
from paceline.core.options import parse_duration_s
from paceline.launch.launcher import option

KINDS = ("trainjob", "jobset", "job")

_LABEL_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL = re.compile(rf"(?:[a-z0-9.-]+/)?{_LABEL_NAME}=(?:{_LABEL_NAME})?")
_SECRET = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([a-z0-9.-]+)/([A-Za-z0-9._-]+)")
_CLAIM = re.compile(r"([a-z0-9](?:[a-z0-9.-]*[a-z0-9])?):(/.+)")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?")
_TOLERATION = re.compile(
    rf"((?:[a-z0-9.-]+/)?{_LABEL_NAME})(?:=({_LABEL_NAME}|))?(?::(NoSchedule|PreferNoSchedule|NoExecute))?"
)
_RESOURCE = re.compile(rf"((?:[a-z0-9.-]+/)?{_LABEL_NAME})=([0-9]+(?:m|[kMGTPE]|[KMGTPE]i)?)")
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """Options of Kubernetes jobs."""

    kind: str = option("trainjob (Kubeflow Trainer), jobset or job. Default: trainjob.", "trainjob")
    image: str | None = option("Container image.")
    namespace: str = option("Kubernetes namespace. Default: default.", "default")
    context: str | None = option("Context of the kubeconfig. Default: its current one.")
    volume: tuple[str, ...] = option("CLAIM:/PATH, a persistent volume claim and its mount point; may be repeated.", ())
    memory: str | None = option("Memory of each node, such as 64Gi.")
    gpu_resource: str = option("The cluster's resource name for GPUs. Default: nvidia.com/gpu.", "nvidia.com/gpu")
    service_account: str | None = option("Service account of the pods.")
    secret: tuple[str, ...] = option(
        "VARIABLE=SECRET/KEY: set a variable from a Kubernetes secret; may be repeated.", ()
    )
    label: tuple[str, ...] = option("KEY=VALUE: label everything that is created; may be repeated.", ())
    node_selector: tuple[str, ...] = option("KEY=VALUE, a label of the nodes to run on; may be repeated.", ())
    toleration: tuple[str, ...] = option(
        "KEY[=VALUE][:EFFECT], a taint of nodes on which the pods may run, such as nvidia.com/gpu:NoSchedule; may be "
        "repeated.",
        (),
    )
    priority_class: str | None = option("Priority class of the pods.")
    image_pull_secret: tuple[str, ...] = option("Secret with which to pull the image; may be repeated.", ())
    host_network: bool = option("Use the nodes' own network, as InfiniBand may need.", False)
    resource: tuple[str, ...] = option(
        "NAME=COUNT, a further resource of each pod, such as rdma/hca_shared_devices_a=1; may be repeated.", ()
    )
    patch: str | None = option(
        "A YAML file of partial objects (kind, and what to change), merged into the manifests as by kubectl patch."
    )
    user: str | None = option(
        "UID[:GID] of the pods, which then meet the restricted Pod Security Standard: no privileges, and a root file "
        "system that is read-only, but for /tmp and the volumes."
    )
    workdir: str | None = option("Working directory in the image. Default: the image's own.")
    grace: str = option("How long a pod may take to save when it is stopped. Default: 5min.", "5min")
    runtime: str | None = option("An existing ClusterTrainingRuntime. Default: create one for the job.")

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"--kind must be one of {', '.join(KINDS)}, but is {self.kind!r}.")
        if not self.image:
            raise ConfigError("--on kubernetes needs --image, a container image that contains Paceline.")
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", self.namespace):
            raise ConfigError(f"--namespace must be lower-case letters, digits and -, but is {self.namespace!r}.")
        if self.memory is not None and not _QUANTITY.fullmatch(self.memory):
            raise ConfigError(f"--memory must be a quantity such as 64Gi, but is {self.memory!r}.")
        if self.runtime is not None and self.kind != "trainjob":
            raise ConfigError(f"--runtime is only for --kind trainjob, but --kind is {self.kind}.")
        if self.workdir is not None and self.runtime is not None:
            raise ConfigError("--workdir cannot be combined with --runtime, which has its own. Leave one of them out.")
        self.user_ids()
        self.claims()
        self.secrets()
        self.labels()
        self.selector()
        self.tolerations()
        self.resources()
        for name in self.image_pull_secret:
            if not _OBJECT_NAME.fullmatch(name):
                raise ConfigError(f"--image-pull-secret must be the name of a secret, but is {name!r}.")
        if self.priority_class is not None and not _OBJECT_NAME.fullmatch(self.priority_class):
            raise ConfigError(f"--priority-class must be the name of a class, but is {self.priority_class!r}.")
        if self.grace_s() < 1:
            raise ConfigError(f"--grace must be at least 1s, but is {self.grace!r}.")

    def user_ids(self) -> tuple[int, int] | None:
        """Return the numbers of the pods' user and group, if they are given."""
        if self.user is None:
            return None
        match = re.fullmatch(r"([1-9][0-9]{0,8})(?::([0-9]{1,9}))?", self.user)
        if match is None:
            raise ConfigError(f"--user must be UID or UID:GID, such as 1000:1000, and not root, but is {self.user!r}.")
        return int(match[1]), int(match[2] or match[1])

    def claims(self) -> dict[str, str]:
        """Return the mount point of each persistent volume claim."""
        return parse_claims(self.volume)

    def secrets(self) -> dict[str, tuple[str, str]]:
        secrets = {}
        for word in self.secret:
            match = _SECRET.fullmatch(word)
            if match is None:
                raise ConfigError(f"--secret must be VARIABLE=SECRET/KEY, such as HF_TOKEN=hub/token, but is {word!r}.")
            secrets[match[1]] = (match[2], match[3])
        return secrets

    def labels(self) -> dict[str, str]:
        return _pairs("--label", self.label)

    def selector(self) -> dict[str, str]:
        """Return the labels of the nodes to run on."""
        return _pairs("--node-selector", self.node_selector)

    def tolerations(self) -> list[dict[str, str]]:
        tolerations = []
        for word in self.toleration:
            match = _TOLERATION.fullmatch(word)
            if match is None:
                raise ConfigError(
                    "--toleration must be KEY[=VALUE][:EFFECT], such as gpu=a100:NoSchedule (or PreferNoSchedule, "
                    f"NoExecute), but is {word!r}."
                )
            key, value, effect = match.groups()
            operator = {"operator": "Exists"} if value is None else {"operator": "Equal", "value": value}
            tolerations.append({"key": key, **operator, **({} if effect is None else {"effect": effect})})
        return tolerations

    def resources(self) -> dict[str, str]:
        resources = {}
        for word in self.resource:
            match = _RESOURCE.fullmatch(word)
            if match is None:
                raise ConfigError(f"--resource must be NAME=COUNT, such as rdma/hca=1, but is {word!r}.")
            resources[match[1]] = match[2]
        return resources

    def grace_s(self) -> int:
        """Return the seconds between SIGTERM and SIGKILL."""
        return int(parse_duration_s(self.grace, "grace"))

    def holds(self, path: PurePosixPath) -> bool:
        return any(path.is_relative_to(mount) for mount in self.claims().values())


def parse_claims(words: Iterable[str]) -> dict[str, str]:
    """Parse CLAIM:/PATH into the mount point of each persistent volume claim."""
    claims: dict[str, str] = {}
    for word in words:
        match = _CLAIM.fullmatch(word)
        if match is None:
            raise ConfigError(f"--volume must be CLAIM:/PATH, such as runs:/runs, but is {word!r}.")
        if match[1] in claims or match[2] in claims.values():
            raise ConfigError(f"--volume {word} repeats a claim or a path. Give each once.")
        claims[match[1]] = match[2]
    return claims


def _pairs(flag: str, words: Iterable[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in words:
        if not _LABEL.fullmatch(word):
            raise ConfigError(f"{flag} must be KEY=VALUE in the form of Kubernetes labels, but is {word!r}.")
        key, _, value = word.partition("=")
        pairs[key] = value
    return pairs
