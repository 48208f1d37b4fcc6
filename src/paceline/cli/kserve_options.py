"""What ``paceline serve --on kserve`` asks beside the server's own options."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.cli.options import group
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline.serving.model import ServingOptions


def _option(help: str) -> Parameter:
    return Parameter(help=help, group=group("--on kserve"), show_default=False, negative="")


@dataclass(frozen=True, kw_only=True)
class KServeOptions:
    """Options of an InferenceService."""

    image: Annotated[str | None, _option("The container image, with Paceline in it.")] = None
    token_secret: Annotated[
        str | None, _option("SECRET/KEY, the Kubernetes secret with the token that clients send.")
    ] = None
    name: Annotated[str | None, _option("The service's name. Default: the package's last part.")] = None
    namespace: Annotated[str, _option("The namespace. Default: default.")] = "default"
    volume: Annotated[
        tuple[str, ...],
        _option("CLAIM:/PATH, a persistent volume claim and where it is mounted; may be repeated."),
    ] = ()
    memory: Annotated[str | None, _option("Memory of each pod, such as 4Gi.")] = None
    service_account: Annotated[str | None, _option("The service account that the pods run as.")] = None
    dry_run: Annotated[bool, _option("Print the InferenceService.")] = False


def print_service(
    kserve: KServeOptions,
    packages: tuple[str, ...],
    words: tuple[str, ...],
    replicas: tuple[int, int],
    options: ServingOptions,
    *,
    json: bool,
) -> int:
    """Print the manifest of a server in pods; ``words`` are options of theirs beside ``options``.

    Raises:
        ConfigError: Kubernetes would refuse it, or its server would.
    """
    from paceline.launch.kubernetes_manifests import InferenceService

    if not kserve.dry_run:
        raise ConfigError(
            "--on kserve prints an InferenceService, and leaves it to kubectl to apply it: "
            "add --dry-run, and | kubectl apply -f -"
        )
    if kserve.image is None or kserve.token_secret is None:
        raise ConfigError(
            "--on kserve needs --image, a container image that has Paceline in it, and --token-secret "
            "SECRET/KEY: other machines reach the server, so clients must send a token."
        )
    if not ({"--trust", "--task", "onnx"} & set(words)):
        raise ConfigError(
            "nothing is trusted in a pod that has just been made. Say --trust if you trust these packages' "
            "programs, --program onnx for one that can run no code, or --task TASK to use the weights alone."
        )
    on_gpus = [device for device in options.devices if device != "cpu"]
    if on_gpus and len(set(options.devices)) != len(on_gpus):
        raise ConfigError(
            f"--devices {','.join(options.devices)}: the pods of --on kserve compute on CPUs, or on GPUs of "
            "their own. Name each GPU once, and no CPU beside them."
        )
    service = InferenceService(
        packages=packages,
        words=(*options.words(), *words),
        image=kserve.image,
        token_secret=kserve.token_secret,
        replicas=replicas,
        gpus=len(on_gpus),
        threads=options.threads,
        timeout_s=options.timeout_s,
        startup_s=options.startup_timeout_s,
        drain_s=options.drain_delay_s,
        name=kserve.name,
        namespace=kserve.namespace,
        volume=kserve.volume,
        memory=kserve.memory,
        service_account=kserve.service_account,
    )
    print(json_module.dumps(service.manifest()) if json else service.text, end="\n" if json else "")
    return 0
