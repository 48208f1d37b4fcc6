"""Options of ``paceline serve --on kserve`` in addition to the server's own."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.cli.options import group
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from paceline_serving.model import ServingOptions


def _option(help: str) -> Parameter:
    return Parameter(help=help, group=group("--on kserve"), show_default=False, negative="")


@dataclass(frozen=True, kw_only=True)
class KServeOptions:
    """Options of an InferenceService."""

    image: Annotated[str | None, _option("Container image that contains Paceline.")] = None
    token_secret: Annotated[
        str | None, _option("SECRET/KEY, the Kubernetes secret with the token that clients send.")
    ] = None
    name: Annotated[str | None, _option("Name of the service. Default: the last part of the package's.")] = None
    namespace: Annotated[str, _option("Kubernetes namespace. Default: default.")] = "default"
    volume: Annotated[
        tuple[str, ...],
        _option("CLAIM:/PATH, a persistent volume claim and its mount point; may be repeated."),
    ] = ()
    memory: Annotated[str | None, _option("Memory of each pod, such as 4Gi.")] = None
    service_account: Annotated[str | None, _option("Service account of the pods.")] = None
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
    """Print the manifest of a server in pods, started with ``options`` and the arguments ``words``.

    Raises:
        ConfigError: Kubernetes would refuse the manifest, or the server its options.
    """
    from paceline_kubernetes.manifests import InferenceService

    if not kserve.dry_run:
        raise ConfigError(
            "--on kserve only prints an InferenceService, which kubectl applies: "
            "add --dry-run, and | kubectl apply -f -"
        )
    if kserve.image is None or kserve.token_secret is None:
        raise ConfigError(
            "--on kserve needs --image, a container image that contains Paceline, and --token-secret "
            "SECRET/KEY: other machines reach the server, so clients must send a token."
        )
    if not ({"--trust", "--task", "onnx"} & set(words)):
        raise ConfigError(
            "a new pod trusts no package. Add --trust if you trust these packages' programs, --program onnx "
            "for programs that cannot run code, or --task TASK to use the weights alone."
        )
    gpus = [device for device in options.devices if device != "cpu"]
    if gpus and len(set(options.devices)) != len(gpus):
        raise ConfigError(
            f"--devices {','.join(options.devices)}: the pods of --on kserve use either CPUs or GPUs. "
            "Name each GPU once, and no CPU together with GPUs."
        )
    service = InferenceService(
        packages=packages,
        words=(*options.words(), *words),
        replicas=replicas,
        gpus=len(gpus),
        threads=options.threads,
        timeout_s=options.timeout_s,
        startup_s=options.startup_timeout_s,
        drain_s=options.drain_delay_s,
        **{option.name: getattr(kserve, option.name) for option in fields(kserve) if option.name != "dry_run"},
    )
    print(json_module.dumps(service.manifest()) if json else service.text, end="\n" if json else "")
    return 0
