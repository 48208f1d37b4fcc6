"""``paceline serve --on kserve``: the same server in pods, as an InferenceService of KServe.

The fields are those of serving.kserve.io/v1beta1: a predictor with a container of one's own, which is called
kserve-container and says its protocol in the variable PROTOCOL. KServe fetches what STORAGE_URI names into
/mnt/models before the container starts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from paceline.errors import ConfigError
from paceline.launchers.kubernetes.options import parse_claims
from paceline.launchers.yaml_text import to_yaml

Manifest = dict[str, Any]

PORT = 8080
_FETCHED = "/mnt/models"
_SECRETS = PurePosixPath("/etc/paceline")
_URI = re.compile(r"[a-z][a-z0-9+.-]*://\S+")
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_SECRET = re.compile(r"([a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)/([A-Za-z0-9._-]+)")
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
            raise ConfigError(
                f"--namespace must be lower-case letters, digits and -, but is {self.namespace!r}."
            )
        if not _SECRET.fullmatch(self.token_secret):
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
            *("--host", "0.0.0.0", "--port", str(PORT), "--token-file", str(_SECRETS / "token")),
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
            "ports": [{"name": "http1", "containerPort": PORT, "protocol": "TCP"}],
            "readinessProbe": {"httpGet": {"path": "/v2/health/ready", "port": PORT}, "periodSeconds": 2},
            # The server listens when its packages are loaded; before that, silence is no fault.
            "startupProbe": {
                "httpGet": {"path": "/v2/health/live", "port": PORT},
                "periodSeconds": 2,
                "failureThreshold": math.ceil(self.startup_s * len(self.packages) / 2) + 1,
            },
            "livenessProbe": {
                "httpGet": {"path": "/v2/health/live", "port": PORT},
                "periodSeconds": 10,
                "timeoutSeconds": 5,
            },
            "resources": {"requests": requests, **({"limits": limits} if limits else {})},
            "volumeMounts": mounts,
        }
