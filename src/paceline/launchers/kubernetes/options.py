"""What ``--on kubernetes`` can be told."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from paceline.config import parse_duration_s
from paceline.errors import ConfigError
from paceline.launchers.names import option

KINDS = ("trainjob", "jobset", "job")

_LABEL_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL = re.compile(rf"(?:[a-z0-9.-]+/)?{_LABEL_NAME}=(?:{_LABEL_NAME})?")
_SECRET = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([a-z0-9.-]+)/([A-Za-z0-9._-]+)")
_CLAIM = re.compile(r"([a-z0-9](?:[a-z0-9.-]*[a-z0-9])?):(/.+)")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?")


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """Options of Kubernetes jobs."""

    kind: str = option("trainjob (Kubeflow Trainer), jobset or job. Default: trainjob.", "trainjob")
    image: str | None = option("The container image.")
    namespace: str = option("The namespace. Default: default.", "default")
    context: str | None = option("The kubeconfig's context. Default: its current one.")
    volume: tuple[str, ...] = option(
        "CLAIM:/PATH, a persistent volume claim and where it is mounted; may be repeated.", ()
    )
    memory: str | None = option("Memory of each machine, such as 64Gi.")
    gpu_resource: str = option("What the cluster calls its GPUs. Default: nvidia.com/gpu.", "nvidia.com/gpu")
    service_account: str | None = option("The service account that the pods run as.")
    secret: tuple[str, ...] = option(
        "VARIABLE=SECRET/KEY, a variable whose value is kept in a Kubernetes secret; may be repeated.", ()
    )
    label: tuple[str, ...] = option("KEY=VALUE, a label of everything that is made; may be repeated.", ())
    node_selector: tuple[str, ...] = option("KEY=VALUE, a label of the nodes to run on; may be repeated.", ())
    workdir: str | None = option("Where the command runs, in the image. Default: the image's own.")
    grace: str = option("How long a pod may take to save when it has to end. Default: 5min.", "5min")
    runtime: str | None = option(
        "A ClusterTrainingRuntime that the cluster has. Default: one of the job's own is made."
    )

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"--kind must be one of {', '.join(KINDS)}, but is {self.kind!r}.")
        if not self.image:
            raise ConfigError("--on kubernetes needs --image, a container image that has Paceline in it.")
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", self.namespace):
            raise ConfigError(
                f"--namespace must be lower-case letters, digits and -, but is {self.namespace!r}."
            )
        if self.memory is not None and not _QUANTITY.fullmatch(self.memory):
            raise ConfigError(f"--memory must be a quantity such as 64Gi, but is {self.memory!r}.")
        if self.runtime is not None and self.kind != "trainjob":
            raise ConfigError(f"--runtime belongs to --kind trainjob, but --kind is {self.kind}.")
        if self.workdir is not None and self.runtime is not None:
            raise ConfigError(
                "--workdir cannot be changed in a runtime that the cluster has: leave out --runtime."
            )
        self.claims()
        self.secrets()
        self.labels()
        self.selector()
        if self.grace_s() < 1:
            raise ConfigError(f"--grace must be at least 1s, but is {self.grace!r}.")

    def claims(self) -> dict[str, str]:
        """Where each persistent volume claim is mounted."""
        return parse_claims(self.volume)

    def secrets(self) -> dict[str, tuple[str, str]]:
        """The secret and its key, of each variable."""
        found = {}
        for word in self.secret:
            match = _SECRET.fullmatch(word)
            if match is None:
                raise ConfigError(
                    f"--secret must be VARIABLE=SECRET/KEY, such as HF_TOKEN=hub/token, but is {word!r}."
                )
            found[match[1]] = (match[2], match[3])
        return found

    def labels(self) -> dict[str, str]:
        """Labels of everything that is made."""
        return _pairs("--label", self.label)

    def selector(self) -> dict[str, str]:
        """Labels of the nodes to run on."""
        return _pairs("--node-selector", self.node_selector)

    def grace_s(self) -> int:
        """Seconds between SIGTERM and SIGKILL."""
        return int(parse_duration_s(self.grace, "grace"))

    def holds(self, path: PurePosixPath) -> bool:
        """Whether a path is in one of the volumes."""
        return any(path.is_relative_to(mount) for mount in self.claims().values())


def parse_claims(words: Iterable[str]) -> dict[str, str]:
    """Where each persistent volume claim is mounted, of words CLAIM:/PATH.

    Raises:
        ConfigError: one is something else, or was given before.
    """
    claims: dict[str, str] = {}
    for word in words:
        match = _CLAIM.fullmatch(word)
        if match is None:
            raise ConfigError(f"--volume must be CLAIM:/PATH, such as runs:/runs, but is {word!r}.")
        if match[1] in claims or match[2] in claims.values():
            raise ConfigError(f"--volume {word}: the claim or the path was given before.")
        claims[match[1]] = match[2]
    return claims


def _pairs(flag: str, words: Iterable[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in words:
        if not _LABEL.fullmatch(word):
            raise ConfigError(f"{flag} must be KEY=VALUE, as Kubernetes takes labels, but is {word!r}.")
        key, _, value = word.partition("=")
        pairs[key] = value
    return pairs
