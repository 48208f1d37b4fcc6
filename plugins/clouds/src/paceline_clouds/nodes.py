"""The rank of a node in its job, from the variables of Amazon SageMaker and of Google's Vertex AI. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from paceline.core.environment import NodeEnvironment
from paceline.core.errors import ConfigError


def sagemaker_node(environ: Mapping[str, str]) -> NodeEnvironment:
    """Read the variables of SageMaker's toolkit or, if the image lacks it, SageMaker's file."""
    if "SM_CURRENT_HOST" in environ:
        current, hosts = environ["SM_CURRENT_HOST"], json.loads(environ.get("SM_HOSTS", "[]"))
        message = f"SM_CURRENT_HOST={current!r} is not in SM_HOSTS={environ.get('SM_HOSTS', '')}"
    else:
        file = Path(environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"), "input/config/resourceconfig.json")
        try:
            config = json.loads(file.read_bytes())
            current, hosts = str(config["current_host"]), list(config["hosts"])
            message = f"current_host, {current!r}, is not one of the hosts in {file}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"this is SageMaker's training job {environ['TRAINING_JOB_NAME']}, but {file} does not name "
                f"this host: {error}."
            ) from error
    hosts = sorted(map(str, hosts))
    if current not in hosts:
        raise ConfigError(f"{message}.")
    return NodeEnvironment(
        node_rank=hosts.index(current),
        nodes=len(hosts),
        hosts=tuple(hosts),
        job_id=environ.get("TRAINING_JOB_NAME"),
        source="sagemaker",
    )


def vertex_node(environ: Mapping[str, str]) -> NodeEnvironment:
    """Read Google's CLUSTER_SPEC: the addresses of each worker pool's nodes, and the index of this one."""
    text = environ["CLUSTER_SPEC"]
    try:
        spec = json.loads(text)
        pools: dict[str, list[str]] = spec["cluster"]
        nodes = [(pool, index) for pool in sorted(pools) for index in range(len(pools[pool]))]
        node_rank = nodes.index((spec["task"]["type"], int(spec["task"]["index"])))
        hosts = tuple(pools[pool][index].rpartition(":")[0] for pool, index in nodes)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"CLUSTER_SPEC={text!r} does not identify this node: {error}.") from error
    return NodeEnvironment(
        node_rank=node_rank,
        nodes=len(nodes),
        hosts=hosts,
        job_id=str(spec["job"]) if "job" in spec else None,
        source="vertex",
    )
