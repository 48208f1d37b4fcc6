"""Which machine of a job is this? What launchers say that start one process on each machine. No torch.

Where they start one process a rank, :mod:`paceline.distributed.environment` reads who it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.distributed.environment import JOB_ID
from paceline.distributed.slurm import expand_hosts
from paceline.errors import ConfigError

NODE_RANK = "PACELINE_NODE_RANK"
NODES = "PACELINE_NODES"
HOSTS = "PACELINE_HOSTS"
"""Host names or addresses of all machines, with commas, in the order of their ranks."""


@dataclass(frozen=True, kw_only=True)
class MachinePlace:
    """A machine's place in its job.

    Attributes:
        node_rank: 0 to ``nodes`` - 1.
        nodes: machines of the job.
        hosts: all machines, in the order of their ranks, where they are known; the first one where only that
            is; else none.
        job_id: equal on all machines of the job, and in no other running job, where known.
        cpus: the job's CPUs on this machine, where known.
        source: who said so.
    """

    node_rank: int = 0
    nodes: int = 1
    hosts: tuple[str, ...] = ()
    job_id: str | None = None
    cpus: int | None = None
    source: str = "single"


def detect_machine(environ: Mapping[str, str] = os.environ) -> MachinePlace:
    """Find this machine's place in its job.

    The first of these that says something wins: Paceline's own variables, which rendered jobs set; torchrun's
    PET_* (Kubeflow); SageMaker's; an indexed Kubernetes Job's; Vertex AI's; Slurm's, inside a step.

    Raises:
        ConfigError: a variable is malformed, or misses its companions.
    """
    if NODE_RANK in environ:
        hosts = _hosts(environ)
        nodes = _integer(environ, NODES, max(1, len(hosts)))
        return _checked(
            MachinePlace(
                node_rank=_integer(environ, NODE_RANK),
                nodes=nodes,
                hosts=hosts,
                job_id=environ.get(JOB_ID),
                source="paceline",
            )
        )
    if "PET_NODE_RANK" in environ:
        master = environ.get("PET_MASTER_ADDR", "")
        # A pod of a job that has grown has the PET_NNODES of the job's beginning; what Paceline says holds.
        nodes = _integer(environ, NODES, 0) or int(environ.get("PET_NNODES", "1").rpartition(":")[2])
        return _checked(
            MachinePlace(
                node_rank=_integer(environ, "PET_NODE_RANK"),
                nodes=nodes,
                hosts=_hosts(environ) or ((master,) if master else ()),
                source="kubeflow",
            )
        )
    if "SM_CURRENT_HOST" in environ or "TRAINING_JOB_NAME" in environ:
        return _sagemaker(environ)
    if "JOB_COMPLETION_INDEX" in environ:
        hosts = _hosts(environ)
        return _checked(
            MachinePlace(
                node_rank=_integer(environ, "JOB_COMPLETION_INDEX"),
                nodes=_integer(environ, NODES, max(1, len(hosts))),
                hosts=hosts,
                source="kubernetes",
            )
        )
    if "CLUSTER_SPEC" in environ:
        return _vertex(environ["CLUSTER_SPEC"])
    if "SLURM_STEP_ID" in environ and "SLURM_STEP_NODELIST" in environ:
        hosts = expand_hosts(environ["SLURM_STEP_NODELIST"])
        return _checked(
            MachinePlace(
                node_rank=_integer(environ, "SLURM_NODEID"),
                nodes=len(hosts),
                hosts=hosts,
                job_id=f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}."
                f"{environ.get('SLURM_RESTART_COUNT', '0')}",
                cpus=_integer(environ, "SLURM_CPUS_ON_NODE") if "SLURM_CPUS_ON_NODE" in environ else None,
                source="slurm",
            )
        )
    return MachinePlace()


def _sagemaker(environ: Mapping[str, str]) -> MachinePlace:
    """What SageMaker's own toolkit says in variables, and where that is not in the image, its file."""
    if "SM_CURRENT_HOST" in environ:
        current, hosts = environ["SM_CURRENT_HOST"], json.loads(environ.get("SM_HOSTS", "[]"))
        said = f"SM_CURRENT_HOST={current!r} is not in SM_HOSTS={environ.get('SM_HOSTS', '')}"
    else:
        file = Path(environ.get("SAGEMAKER_BASE_DIR", "/opt/ml"), "input/config/resourceconfig.json")
        try:
            config = json.loads(file.read_bytes())
            current, hosts = str(config["current_host"]), list(config["hosts"])
            said = f"current_host, {current!r}, is not one of the hosts in {file}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"this is SageMaker's training job {environ['TRAINING_JOB_NAME']}, but {file} does not say "
                f"which host this is: {error}."
            ) from error
    hosts = sorted(map(str, hosts))
    if current not in hosts:
        raise ConfigError(f"{said}.")
    return MachinePlace(
        node_rank=hosts.index(current),
        nodes=len(hosts),
        hosts=tuple(hosts),
        job_id=environ.get("TRAINING_JOB_NAME"),
        source="sagemaker",
    )


def _vertex(text: str) -> MachinePlace:
    """Google's CLUSTER_SPEC: the addresses of each worker pool's machines, and which one this is."""
    try:
        spec = json.loads(text)
        pools: dict[str, list[str]] = spec["cluster"]
        machines = [(pool, index) for pool in sorted(pools) for index in range(len(pools[pool]))]
        node_rank = machines.index((spec["task"]["type"], int(spec["task"]["index"])))
        hosts = tuple(pools[pool][index].rpartition(":")[0] for pool, index in machines)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"CLUSTER_SPEC={text!r} does not say which machine this is: {error}.") from error
    return MachinePlace(
        node_rank=node_rank,
        nodes=len(machines),
        hosts=hosts,
        job_id=str(spec["job"]) if "job" in spec else None,
        source="vertex",
    )


def _hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(host for host in environ.get(HOSTS, "").split(",") if host)


def _checked(place: MachinePlace) -> MachinePlace:
    if not 0 <= place.node_rank < place.nodes:
        raise ConfigError(
            f"this machine is number {place.node_rank} of {place.nodes}, says {place.source}: it must be "
            f"from 0 to {place.nodes - 1}."
        )
    return place


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"{name} must be a whole number, but is {text!r}.") from None
