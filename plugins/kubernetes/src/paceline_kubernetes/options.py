"""The options of ``--on kubernetes``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from paceline.core.errors import ConfigError
from paceline.core.options import parse_duration_s, require_form
from paceline.launch.launcher import option

KINDS = ("trainjob", "jobset", "job")

_LABEL_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
NAMESPACE = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
QUANTITY = r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?"
_KEY = rf"((?:[a-z0-9.-]+/)?{_LABEL_NAME})"
_LABEL = rf"{_KEY}=((?:{_LABEL_NAME})?)"
_SECRET = r"([A-Za-z_][A-Za-z0-9_]*)=([a-z0-9.-]+)/([A-Za-z0-9._-]+)"
_CLAIM = r"([a-z0-9](?:[a-z0-9.-]*[a-z0-9])?):(/.+)"
_TOLERATION = rf"{_KEY}(?:=({_LABEL_NAME}|))?(?::(NoSchedule|PreferNoSchedule|NoExecute))?"
_RESOURCE = rf"{_KEY}=([0-9]+(?:m|[kMGTPE]|[KMGTPE]i)?)"
_OBJECT_NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
_USER = r"([1-9][0-9]{0,8})(?::([0-9]{1,9}))?"


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
        require_form("--namespace", NAMESPACE, self.namespace, "lower-case letters, digits and -")
        if self.memory is not None:
            require_form("--memory", QUANTITY, self.memory, "a quantity such as 64Gi")
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
            require_form("--image-pull-secret", _OBJECT_NAME, name, "the name of a secret")
        if self.priority_class is not None:
            require_form("--priority-class", _OBJECT_NAME, self.priority_class, "the name of a class")
        if self.grace_s() < 1:
            raise ConfigError(f"--grace must be at least 1s, but is {self.grace!r}.")

    def user_ids(self) -> tuple[int, int] | None:
        """Return the numbers of the pods' user and group, if they are given."""
        if self.user is None:
            return None
        match = require_form("--user", _USER, self.user, "UID or UID:GID, such as 1000:1000, and not root")
        return int(match[1]), int(match[2] or match[1])

    def claims(self) -> dict[str, str]:
        """Return the mount point of each persistent volume claim."""
        return parse_claims(self.volume)

    def secrets(self) -> dict[str, tuple[str, str]]:
        form = "VARIABLE=SECRET/KEY, such as HF_TOKEN=hub/token"
        matches = [require_form("--secret", _SECRET, word, form) for word in self.secret]
        return {match[1]: (match[2], match[3]) for match in matches}

    def labels(self) -> dict[str, str]:
        return _pairs("--label", self.label)

    def selector(self) -> dict[str, str]:
        """Return the labels of the nodes to run on."""
        return _pairs("--node-selector", self.node_selector)

    def tolerations(self) -> list[dict[str, str]]:
        tolerations = []
        for word in self.toleration:
            form = "KEY[=VALUE][:EFFECT], such as gpu=a100:NoSchedule (or PreferNoSchedule, NoExecute)"
            key, value, effect = require_form("--toleration", _TOLERATION, word, form).groups()
            operator = {"operator": "Exists"} if value is None else {"operator": "Equal", "value": value}
            tolerations.append({"key": key, **operator, **({} if effect is None else {"effect": effect})})
        return tolerations

    def resources(self) -> dict[str, str]:
        form = "NAME=COUNT, such as rdma/hca=1"
        matches = [require_form("--resource", _RESOURCE, word, form) for word in self.resource]
        return {match[1]: match[2] for match in matches}

    def grace_s(self) -> int:
        """Return the seconds between SIGTERM and SIGKILL."""
        return int(parse_duration_s(self.grace, "grace"))

    def holds(self, path: PurePosixPath) -> bool:
        return any(path.is_relative_to(mount) for mount in self.claims().values())


def parse_claims(words: Iterable[str]) -> dict[str, str]:
    """Parse CLAIM:/PATH into the mount point of each persistent volume claim."""
    claims: dict[str, str] = {}
    for word in words:
        match = require_form("--volume", _CLAIM, word, "CLAIM:/PATH, such as runs:/runs")
        if match[1] in claims or match[2] in claims.values():
            raise ConfigError(f"--volume {word} repeats a claim or a path. Give each once.")
        claims[match[1]] = match[2]
    return claims


def _pairs(flag: str, words: Iterable[str]) -> dict[str, str]:
    form = "KEY=VALUE in the form of Kubernetes labels"
    return {match[1]: match[2] for match in (require_form(flag, _LABEL, word, form) for word in words)}
