"""Which models a server has, and what clients are told of them, whatever they speak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.serving.datatypes import DATATYPES
from paceline.serving.deployment import Deployment
from paceline.serving.failures import RequestFailure

SERVER_NAME = "paceline"


def find_deployment(
    deployments: Mapping[str, Deployment], name: str, version: str | None = None
) -> Deployment:
    """The model of this name, and of this version where one is given.

    Raises:
        RequestFailure: there is none; says which there are.
    """
    deployment = deployments.get(name)
    if deployment is None:
        raise RequestFailure(404, f"there is no model {name!r:.80}; there is: {', '.join(deployments)}.")
    require_version(deployment, version)
    return deployment


def require_version(deployment: Deployment, version: str | None) -> None:
    """See that a client asks for the version that there is, or for none (RequestFailure)."""
    spec = deployment.spec
    if version not in (None, spec.version):
        raise RequestFailure(404, f"of {spec.name} there is the version {spec.version}.")


def model_metadata(deployment: Deployment) -> dict[str, Any]:
    """What clients are told of a model; sizes that are free are -1."""
    spec = deployment.spec
    tensors = {
        side: [
            {
                "name": name,
                "datatype": DATATYPES[tensor.dtype],
                "shape": [-1, *(-1 if size is None else size for size in tensor.shape)],
            }
            for name, tensor in specs.items()
        ]
        for side, specs in (("inputs", spec.inputs), ("outputs", spec.outputs))
    }
    parameters = {"labels": spec.labels, "label": spec.label, "probabilities": spec.probabilities}
    return {
        "name": spec.name,
        "versions": [spec.version],
        "platform": spec.platform,
        **tensors,
        "parameters": {name: value for name, value in parameters.items() if value},
    }
