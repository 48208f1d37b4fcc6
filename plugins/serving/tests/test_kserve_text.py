"""What ``paceline serve --on kserve --dry-run`` prints, compared whole, and known to the published models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from tests.lab.kubernetes_api import unknown_fields
from tests.processes import Processes

from paceline.core.errors import ConfigError
from paceline_kubernetes.manifests import InferenceService
from paceline_serving.model import ServingOptions

pytestmark = pytest.mark.k8s

# Of a predictor, in serving.kserve.io/v1beta1; all its other fields are those of a pod.
_PREDICTOR = {"minReplicas", "maxReplicas", "timeout"}
IMAGE = "r.example/paceline:1"


def expected(name: str) -> str:
    return (Path(__file__).parent / "kubernetes_texts" / name).read_text()


def render(**fields: Any) -> str:
    options = fields.pop("options", ServingOptions())
    described: dict[str, Any] = {
        "packages": ("s3://models/fashion-mnist",),
        "image": IMAGE,
        "token_secret": "serving/token",
        "replicas": (1, 1),
        "gpus": 0,
        "threads": options.threads,
        "timeout_s": options.timeout_s,
        "startup_s": options.startup_timeout_s,
        "drain_s": options.drain_delay_s,
        **fields,
        "words": (*options.words(), *fields.get("words", ())),
    }
    service = InferenceService(**described)
    document = yaml.safe_load(service.text)
    assert document == service.manifest()
    predictor = document["spec"]["predictor"]
    pod = {name: value for name, value in predictor.items() if name not in _PREDICTOR}
    model = client.V1PodSpec.from_dict(pod)
    assert not list(unknown_fields(pod, client.ApiClient().sanitize_for_serialization(model)))
    return service.text


def test_a_package_that_kserve_fetches() -> None:
    options = ServingOptions(max_wait_s=0.005, timeout_s=10)
    text = render(options=options, replicas=(2, 6), words=("--trust",), memory="2Gi")
    assert text == expected("kserve-fetched.yaml")


def test_packages_in_a_volume_on_gpus() -> None:
    text = render(
        packages=("/m/fashion-mnist", "/m/other"),
        volume=("models:/m",),
        gpus=2,
        words=("--program", "onnx"),
        service_account="reader",
        name="vision",
        namespace="team",
    )
    assert text == expected("kserve-on-gpus.yaml")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"packages": ("fashion-mnist@prod",)}, "does not exist in a pod"),
        ({"packages": ("/m/../etc",), "volume": ("models:/m",)}, "does not exist in a pod"),
        ({"packages": ("s3://a/b", "s3://a/c")}, "KServe downloads only one package"),
        ({"packages": ("s3://a/Fashion_MNIST",)}, "the service name 'Fashion_MNIST' is not valid.*Give --name"),
        ({"namespace": "My Team"}, "--namespace"),
        ({"volume": ("models",)}, "--volume must be CLAIM:/PATH"),
        ({"memory": "2 GB"}, "--memory must be a quantity such as 4Gi"),
        ({"token_secret": "0123456789abcdef"}, "--token-secret must be SECRET/KEY"),
    ],
)
def test_what_would_be_refused_is_refused_before(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render(**fields)


def test_options_as_words() -> None:
    options = ServingOptions(max_batch=8, max_queue=9, max_body_bytes=2**20, hang_timeout_s=0.25, threads=2)
    assert options.words() == (
        *("--threads", "2", "--max-batch", "8", "--max-queue", "9"),
        *("--hang-timeout", "250ms", "--max-body", "1"),
    )


def test_the_command(run_processes: Processes) -> None:
    words = ("serve", "s3://models/fashion-mnist", "--on", "kserve", "--image", IMAGE)
    options = ("--replicas", "2:6", "--max-wait", "5ms", "--timeout", "10s", "--memory", "2Gi", "--trust")
    done = run_processes.paceline(*words, "--token-secret", "serving/token", *options, "--dry-run")
    assert (done.returncode, done.stdout) == (0, expected("kserve-fetched.yaml")), done.stderr
    rest = ("--token-secret", "serving/token", *options, "--dry-run")
    for missing, said in (
        (("--token-secret", "serving/token", "--trust"), "kubectl apply -f -"),
        (("--trust", "--dry-run"), "--token-secret SECRET/KEY"),
        (("--token-secret", "serving/token", "--dry-run"), "a new pod trusts no package"),
        (("--grpc-port", "8081", "--dry-run"), "are not supported by --on kserve"),
        (("--devices", "cpu,cuda:0", *rest), "Name each GPU once, and no CPU together with GPUs"),
    ):
        done = run_processes.paceline(*words, *missing)
        assert done.returncode == 2
        assert said in done.stderr
