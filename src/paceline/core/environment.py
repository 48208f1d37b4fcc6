"""The process in its environment: the variables that launchers set, the seed of hashes, and the GPUs of the node."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import util
from pathlib import Path
from typing import Literal

from paceline.core.built_in import PARTS, RANK_DETECTORS
from paceline.core.errors import ConfigError
from paceline.core.plugins import import_object

# --- Temporary environment variables. No torch ---


@contextmanager
def patch_environ(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and restore them on exit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# --- Slurm's compressed lists, and the allocation of this process ---


def tasks_per_node(text: str, variable: str = "SLURM_STEP_TASKS_PER_NODE") -> list[int]:
    """Parse Slurm's numbers of tasks per node: ``2(x3),1`` -> [2, 2, 2, 1].

    Raises:
        ConfigError: the text has another form.
    """
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"{variable} is malformed: {text!r}.")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def expand_hosts(node_list: str) -> tuple[str, ...]:
    """Return every host of a Slurm node list: ``gpu[03-04,12],login1`` -> gpu03, gpu04, gpu12, login1.

    Raises:
        ConfigError: the text is not a node list.
    """
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", node_list):
        expanded = [""]
        for text, numbers in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            choices = [text] if text else _numbers(numbers, node_list)
            expanded = [before + choice for before in expanded for choice in choices]
        hosts += expanded
    if not hosts or not all(hosts):
        raise ConfigError(f"the Slurm node list {node_list!r} names no host.")
    return tuple(hosts)


def allocation_nodes(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of nodes of the Slurm allocation, as under ``salloc``; None outside of one."""
    if "SLURM_JOB_ID" not in environ:
        return None
    text = environ.get("SLURM_JOB_NUM_NODES", "1")
    if not text.isdigit():
        raise ConfigError(f"SLURM_JOB_NUM_NODES must be a number, but is {text!r}.")
    return int(text)


def allocation_tasks(environ: Mapping[str, str] = os.environ) -> tuple[int, ...] | None:
    """Return the tasks on each node of the Slurm allocation; None outside of one, or if it was made without tasks."""
    if "SLURM_JOB_ID" not in environ or "SLURM_TASKS_PER_NODE" not in environ:
        return None
    if "SLURM_NTASKS" not in environ and "SLURM_NTASKS_PER_NODE" not in environ:
        return None
    return tuple(tasks_per_node(environ["SLURM_TASKS_PER_NODE"], "SLURM_TASKS_PER_NODE"))


def _numbers(text: str, node_list: str) -> list[str]:
    """Expand ``03-05,9`` to 03, 04, 05, 9."""
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ConfigError(f"the Slurm node list {node_list!r} is malformed.")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


# --- The rank of this process: the one place that reads the rank variables of launchers. No torch ---
#
# The first of these sources that is set wins:
#
# 1. the caller: ``rank`` and ``world_size`` given to ``fit()``;
# 2. torchrun's variables, which ``python -m torch.distributed.launch`` and the spawn launcher set too;
# 3. those of plug-ins, such as Horovod's;
# 4. MPI's: Open MPI, then MPICH and Intel MPI (PMI);
# 5. Slurm's, and only inside an ``srun`` step: in the body of an sbatch script, and under an
#    ``mpirun`` in an allocation, SLURM_PROCID is 0 in every process;
# 6. none: a single process.


LISTEN_FD = "PACELINE_LISTEN_FD"
"""The descriptor of a socket, bound to MASTER_PORT on loopback, that rank 0 inherits from the spawn launcher."""

JOB_ID = "PACELINE_JOB_ID"
"""The job's id, the spawn launcher's ``--rdzv-id``; it keeps ranks out of other jobs' stores."""

Names = tuple[str, str, str, str]
"""What a launcher calls rank, world size, local rank and local world size."""

_TORCH_NAMES: Names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The rank of a process in its job.

    Attributes:
        rank: 0 to ``world_size`` - 1.
        local_rank: 0 to ``local_world_size`` - 1, among the processes of this node.
        node_rank: 0 to ``nodes`` - 1.
        source: where the ranks come from: "caller", "torchrun", "variables" (as torchrun's, of another launcher),
            "mpi", "slurm", "single", or a plug-in's.
        master_addr: host of rank 0's store, where known.
        master_port: its port, where known.
        restart_count: how often torchrun's agent on this node restarted its workers.
        job_id: equal in all processes of a job and unique to it, where known.
        uses_agent_store: torchrun's agent serves the store at ``master_addr:master_port``.
        listen_fd: an inherited socket for rank 0's store, bound to ``master_port``.
        first_host: the host of rank 0, if the launcher names it (Slurm).
        names: the launcher's, for messages.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    nodes: int = 1
    source: str = "single"
    master_addr: str | None = None
    master_port: int | None = None
    restart_count: int = 0
    job_id: str | None = None
    uses_agent_store: bool = False
    listen_fd: int | None = None
    first_host: str | None = None
    names: Names = field(default=_TORCH_NAMES, compare=False, repr=False)

    @property
    def is_single_node(self) -> bool:
        """Whether the launcher started all processes on this node."""
        return self.local_world_size == self.world_size


def detect_environment(
    environ: Mapping[str, str] = os.environ,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_url: str | None = None,
    rdzv_endpoint: str | None = None,
) -> Environment:
    """Detect the rank of this process in its job.

    Args:
        rank: overrides every variable; needs ``world_size``.
        world_size: overrides every variable; needs ``rank``.
        init_url: ``tcp://HOST:PORT``, where rank 0 listens; overrides MASTER_ADDR and MASTER_PORT.
        rdzv_endpoint: the same as ``HOST:PORT``, for launchers that set no MASTER_ADDR.

    Raises:
        ConfigError: a variable is malformed, missing while its companions are set, or contradicts them.
    """
    if (rank is None) != (world_size is None):
        raise ConfigError("rank and world_size belong together: give both, or neither.")
    address = _address(environ)
    if init_url is not None:
        if not init_url.startswith("tcp://"):
            raise ConfigError(f"init_url must be tcp://HOST:PORT, but is {init_url!r}.")
        address = parse_endpoint(init_url.removeprefix("tcp://"), "init_url")
    elif rdzv_endpoint is not None and address[0] is None:
        address = parse_endpoint(rdzv_endpoint, "--rdzv-endpoint")

    if rank is not None and world_size is not None:
        local = _local_ranks(environ, rank, world_size, address[0])
        environment = _numbered_by_node(
            "caller", rank, world_size, *local, ("rank", "world_size", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
    else:
        environment = _torchrun(environ) or _plug_in(environ) or _mpi(environ) or _slurm(environ) or Environment()
    _check(environment)
    environment = replace(environment, master_addr=address[0], master_port=address[1])
    needs_address = environment.source in ("caller", "torchrun", "variables")
    if environment.world_size > 1 and needs_address and (address[0] is None or address[1] is None):
        raise ConfigError(
            f"this is rank {environment.rank} of {environment.world_size}, but MASTER_ADDR and MASTER_PORT "
            "are not both set. Set them, or give init_url='tcp://HOST:PORT'."
        )
    return environment


def _torchrun(environ: Mapping[str, str]) -> Environment | None:
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return None
    rank, world_size = integer_of(environ, "RANK"), integer_of(environ, "WORLD_SIZE")
    host = environ.get("MASTER_ADDR")
    local_rank, local_world_size = _local_ranks(environ, rank, world_size, host)
    by_agent = "TORCHELASTIC_RUN_ID" in environ
    environment = _numbered_by_node(
        "torchrun" if by_agent else "variables", rank, world_size, local_rank, local_world_size
    )
    return replace(
        environment,
        node_rank=integer_of(environ, "GROUP_RANK", environment.node_rank),
        nodes=integer_of(environ, "GROUP_WORLD_SIZE", environment.nodes),
        restart_count=integer_of(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        job_id=environ.get("TORCHELASTIC_RUN_ID") or environ.get(JOB_ID),
        uses_agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        listen_fd=integer_of(environ, LISTEN_FD) if rank == 0 and LISTEN_FD in environ else None,
    )


def _plug_in(environ: Mapping[str, str]) -> Environment | None:
    reference = next((reference for variable, reference in RANK_DETECTORS.items() if variable in environ), None)
    return None if reference is None else import_object(reference)(environ)


_MPI_NAMES: Names = ("the MPI rank", "the MPI size", "the MPI local rank", "the MPI local size")


def _mpi(environ: Mapping[str, str]) -> Environment | None:
    if "OMPI_COMM_WORLD_RANK" in environ:
        world = "OMPI_COMM_WORLD"
        names = (f"{world}_RANK", f"{world}_SIZE", f"{world}_LOCAL_RANK", f"{world}_LOCAL_SIZE")
        job_id = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    # srun sets PMI_RANK too, but not the local rank, which Slurm's own variables have.
    elif "PMI_RANK" in environ and "MPI_LOCALRANKID" in environ:
        names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        job_id = environ.get("PMI_JOBID")
    else:
        return None
    return replace(rank_by_variables("mpi", environ, names, _MPI_NAMES), job_id=job_id)


def _slurm(environ: Mapping[str, str]) -> Environment | None:
    if "SLURM_STEP_ID" not in environ or integer_of(environ, "SLURM_STEP_NUM_TASKS", 1) < 2:
        return None
    node_rank = integer_of(environ, "SLURM_NODEID")
    tasks = tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"]) if "SLURM_STEP_TASKS_PER_NODE" in environ else []
    if node_rank >= len(tasks):
        raise ConfigError(
            f"SLURM_NODEID={node_rank} does not fit SLURM_STEP_TASKS_PER_NODE="
            f"{environ.get('SLURM_STEP_TASKS_PER_NODE', '')!r}. Start the processes with srun."
        )
    nodes = environ.get("SLURM_STEP_NODELIST")
    return Environment(
        source="slurm",
        rank=integer_of(environ, "SLURM_PROCID"),
        world_size=integer_of(environ, "SLURM_STEP_NUM_TASKS"),
        local_rank=integer_of(environ, "SLURM_LOCALID"),
        local_world_size=tasks[node_rank],
        node_rank=node_rank,
        nodes=len(tasks),
        job_id=f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}",
        first_host=expand_hosts(nodes)[0] if nodes else None,
        names=("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    )


_RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", LISTEN_FD),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"),
    *(*RANK_DETECTORS, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_ID"),
)


def has_local_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher has numbered this process among those of its node."""
    return "LOCAL_RANK" in environ


def variables_of_another_job(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables without this process's rank and address, for a job started within this one."""
    return {name: value for name, value in environ.items() if name not in _RANK_VARIABLES}


@contextmanager
def without_rank_variables() -> Iterator[None]:
    """Remove the variables of a launcher that has made this process a rank: its children are not that rank."""
    if detect_environment().source == "single":
        yield
        return
    removed = {name: os.environ.pop(name) for name in _RANK_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(removed)


def default_threads(
    environment: Environment,
    requested: int | None = None,
    environ: Mapping[str, str] = os.environ,
    cpus: int | None = None,
) -> int:
    """Return the CPU threads per process: ``requested``, else OMP_NUM_THREADS, else CPUs over local ranks, at least 1.

    The number affects bits, so it must be equal under every launcher. Two launcher defaults are therefore ignored:
    torchrun sets OMP_NUM_THREADS=1 if the user set none, and ``mpirun`` and ``srun`` bind each process to a few CPUs.

    Args:
        environment: the rank of this process.
        requested: ``--threads``.
        cpus: the job's CPUs on this node; default: detected.

    Raises:
        ConfigError: OMP_NUM_THREADS is not a positive number.
    """
    if requested is not None:
        return requested
    if "OMP_NUM_THREADS" in environ and not (environment.source == "torchrun" and _omp_threads_are_torchruns(environ)):
        # OpenMP allows a list with one number per nesting level.
        text = environ["OMP_NUM_THREADS"].split(",")[0].strip()
        if not text.isdigit() or int(text) < 1:
            raise ConfigError(f"OMP_NUM_THREADS must be a positive number, but is {environ['OMP_NUM_THREADS']!r}.")
        return int(text)
    return max(1, (cpus or _job_cpus(environment, environ)) // environment.local_world_size)


def _omp_threads_are_torchruns(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun's agent, the parent, set OMP_NUM_THREADS: it was started without it."""
    if environ["OMP_NUM_THREADS"] != "1":
        return False
    try:
        started_with = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in started_with)


def _job_cpus(environment: Environment, environ: Mapping[str, str]) -> int:
    own = os.sched_getaffinity(0)
    if environment.source == "mpi":
        # mpirun binds its processes, not itself.
        try:
            return len(own | os.sched_getaffinity(os.getppid()))
        except OSError:
            return len(own)
    if environment.source == "slurm":
        return integer_of(environ, "SLURM_CPUS_ON_NODE", len(own))
    return len(own)


def is_loopback(host: str) -> bool:
    """Return whether an address is this node's own; a name other than localhost is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_endpoint(text: str, name: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``, with IPv6 addresses in brackets.

    Raises:
        ConfigError: the text has another form.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"{name} must be HOST:PORT with a port from 1 to 65535, but is {text!r}.")
    return host, int(port)


@dataclass(frozen=True)
class EtcdEndpoints:
    """The members of an etcd cluster, as ``--coordinator`` names them.

    Attributes:
        tls: whether connections are encrypted.
        addresses: host and port of each.
    """

    tls: bool
    addresses: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return ", ".join(f"{host}:{port}" for host, port in self.addresses)


def parse_coordinator(text: str) -> EtcdEndpoints:
    """Parse ``etcd://HOST[:PORT][,HOST[:PORT]...]``, or ``etcds://`` for TLS; etcd's port is 2379.

    Raises:
        ConfigError: the text has another form, or contains a password.
    """
    scheme, separator, hosts = text.partition("://")
    if "@" in text:
        raise ConfigError(
            "--coordinator must not contain a user or a password, which others could read in the list of processes. "
            "Set ETCDCTL_USER and ETCDCTL_PASSWORD."
        )
    if scheme not in ("etcd", "etcds") or not separator or not hosts:
        raise ConfigError(
            f"--coordinator must be etcd://HOST:PORT[,HOST:PORT...], or etcds:// for TLS, but is {text!r}."
        )
    names = [host if ":" in host.rpartition("]")[2] else f"{host}:2379" for host in hosts.rstrip("/").split(",")]
    return EtcdEndpoints(scheme == "etcds", tuple(parse_endpoint(name, "--coordinator") for name in names))


def _address(environ: Mapping[str, str]) -> tuple[str | None, int | None]:
    port = integer_of(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else None
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"MASTER_PORT must be a port from 1 to 65535, but is {port}.")
    return environ.get("MASTER_ADDR") or None, port


def _local_ranks(environ: Mapping[str, str], rank: int, world_size: int, host: str | None) -> tuple[int, int]:
    """Return local rank and size; if only the global ones are set, a loopback master means one node."""
    if "LOCAL_RANK" not in environ and "LOCAL_WORLD_SIZE" not in environ:
        return (rank, world_size) if host is None or is_loopback(host) else (0, 1)
    return integer_of(environ, "LOCAL_RANK"), integer_of(environ, "LOCAL_WORLD_SIZE", world_size)


def _numbered_by_node(
    source: str, rank: int, world_size: int, local_rank: int, local_world_size: int, names: Names = _TORCH_NAMES
) -> Environment:
    """Fill in the node's rank, assuming that ranks are numbered node by node."""
    size = max(1, local_world_size)
    return Environment(
        source=source,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=rank // size,
        nodes=max(1, -(-world_size // size)),
        names=names,
    )


def rank_by_variables(
    source: str, environ: Mapping[str, str], variables: Names, names: Names | None = None
) -> Environment:
    """Return the rank of a process whose launcher sets four variables, in the order of :data:`Names`.

    Args:
        names: what messages call them; default: by the variables' names.

    Raises:
        ConfigError: a variable is malformed, or missing.
    """
    rank, world_size, local_rank, local_world_size = (integer_of(environ, name) for name in variables)
    return _numbered_by_node(source, rank, world_size, local_rank, local_world_size, names or variables)


def _check(e: Environment) -> None:
    rank, size, local_rank, local_size = e.names
    if e.world_size < 1:
        raise ConfigError(f"{size} must be at least 1, but is {e.world_size}.")
    if not 0 <= e.rank < e.world_size:
        raise ConfigError(f"{rank} must be between 0 and {size} - 1 = {e.world_size - 1}, but is {e.rank}.")
    if not 1 <= e.local_world_size <= e.world_size:
        raise ConfigError(f"{local_size} must be between 1 and {size} = {e.world_size}, but is {e.local_world_size}.")
    if not 0 <= e.local_rank < e.local_world_size:
        raise ConfigError(
            f"{local_rank} must be between 0 and {local_size} - 1 = {e.local_world_size - 1}, but is {e.local_rank}."
        )


def integer_of(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable as a number.

    Raises:
        ConfigError: it is not a whole number, or is not set and has no default.
    """
    text = environ.get(name)
    if text is None:
        if default is not None:
            return default
        found = [f"{other}={environ[other]}" for other in _RANK_VARIABLES if other in environ]
        raise ConfigError(
            f"{name} is not set, but {', '.join(found)}. Set it, or unset the others to run a single process."
        )
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} must be a whole number, but is {text!r}.") from None


# --- The rank of this node, from launchers that start one process per node. No torch ---


NODE_RANK = "PACELINE_NODE_RANK"
NODES = "PACELINE_NODES"
HOSTS = "PACELINE_HOSTS"
"""Host names or addresses of all nodes, comma-separated, in the order of their ranks."""


@dataclass(frozen=True, kw_only=True)
class NodeEnvironment:
    """The rank of a node in its job.

    Attributes:
        node_rank: 0 to ``nodes`` - 1.
        hosts: all nodes in the order of their ranks, or only the first one, or none, as far as known.
        job_id: equal on all nodes of the job and unique to it, where known.
        cpus: the job's CPUs on this node, where known.
        source: the launcher that set the variables.
    """

    node_rank: int = 0
    nodes: int = 1
    hosts: tuple[str, ...] = ()
    job_id: str | None = None
    cpus: int | None = None
    source: str = "single"


def detect_node(environ: Mapping[str, str] = os.environ) -> NodeEnvironment:
    """Detect the rank of this node in its job.

    The first of these that is set wins: Paceline's own variables, from rendered jobs; torchrun's PET_* (Kubeflow);
    SageMaker's; an indexed Kubernetes Job's; Vertex AI's; Slurm's, inside a step.

    Raises:
        ConfigError: a variable is malformed or missing.
    """
    hosts = tuple(host for host in environ.get(HOSTS, "").split(",") if host)
    if NODE_RANK in environ:
        environment = NodeEnvironment(
            node_rank=integer_of(environ, NODE_RANK),
            nodes=integer_of(environ, NODES, max(1, len(hosts))),
            hosts=hosts,
            job_id=environ.get(JOB_ID),
            source="paceline",
        )
    elif "PET_NODE_RANK" in environ:
        master = environ.get("PET_MASTER_ADDR", "")
        environment = NodeEnvironment(
            node_rank=integer_of(environ, "PET_NODE_RANK"),
            # After a scale-up, PET_NNODES still has the initial number; Paceline's own variable is current.
            nodes=integer_of(environ, NODES, 0) or int(environ.get("PET_NNODES", "1").rpartition(":")[2]),
            hosts=hosts or ((master,) if master else ()),
            source="kubeflow",
        )
    elif "SM_CURRENT_HOST" in environ or "TRAINING_JOB_NAME" in environ:
        environment = import_object(PARTS["SageMaker's nodes"])(environ)
    elif "JOB_COMPLETION_INDEX" in environ:
        environment = NodeEnvironment(
            node_rank=integer_of(environ, "JOB_COMPLETION_INDEX"),
            nodes=integer_of(environ, NODES, max(1, len(hosts))),
            hosts=hosts,
            source="kubernetes",
        )
    elif "CLUSTER_SPEC" in environ:
        environment = import_object(PARTS["Vertex AI's nodes"])(environ)
    elif "SLURM_STEP_ID" in environ and "SLURM_STEP_NODELIST" in environ:
        hosts = expand_hosts(environ["SLURM_STEP_NODELIST"])
        environment = NodeEnvironment(
            node_rank=integer_of(environ, "SLURM_NODEID"),
            nodes=len(hosts),
            hosts=hosts,
            job_id=f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}."
            f"{environ.get('SLURM_RESTART_COUNT', '0')}",
            cpus=integer_of(environ, "SLURM_CPUS_ON_NODE") if "SLURM_CPUS_ON_NODE" in environ else None,
            source="slurm",
        )
    else:
        environment = NodeEnvironment()
    if not 0 <= environment.node_rank < environment.nodes:
        raise ConfigError(
            f"the node rank from {environment.source} is {environment.node_rank}, but must be between 0 and "
            f"{environment.nodes - 1}."
        )
    return environment


# --- The seed of Python's hashes, which decides the order of a set of strings: the same in every process of a run ---
#
# Python reads the seed when it starts, so a process that trains and has no seed restarts itself with one. A seed that
# the user has set stays, and so does ``random``.

_HASH_SEED = "PYTHONHASHSEED"


def with_hash_seed(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a process that trains, or that forks such processes."""
    return {_HASH_SEED: "0", **environ}  # as Python documents it: no randomization


def restart_with_hash_seed() -> None:
    """Start this program again, in this process, unless its hashes have a seed; call this before anything has begun."""
    if _HASH_SEED not in os.environ and sys.executable:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], with_hash_seed(os.environ))


# --- GPUs, counted without torch and without CUDA: a process that has called into CUDA cannot fork ---


_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
_DEVICES = Path("/dev")
_NVML = "libnvidia-ml.so.1"


def visible_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many NVIDIA GPUs of this node a process sees, by the rules of CUDA_VISIBLE_DEVICES.

    The first entry that names no GPU ends the list; a repeated one empties it; of MIG instances a process sees one.
    See "CUDA Environment Variables" in NVIDIA's CUDA C++ Programming Guide.
    """
    installed = _installed_gpus()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not installed:
        return installed
    entries: list[str] = []
    for entry in map(str.strip, visible.split(",")):
        if entry.startswith(("GPU-", "MIG-")):
            name = entry
        else:
            number = re.match(r"\+?\d+", entry)  # as strtoul reads it
            if number is None or int(number[0]) >= installed:
                break
            name = str(int(number[0]))
        if name in entries:
            return 0
        entries.append(name)
    return min(len(entries), 1 if visible.startswith("MIG-") else installed)


def preferred_device() -> Literal["cpu", "cuda"]:
    """Return the device of ``--device auto`` on this node: GPUs, if some are visible and torch is built for them."""
    return "cuda" if visible_gpus() and torch_has_cuda() else "cpu"


@cache
def torch_has_cuda() -> bool:
    """Return whether the installed torch is built with CUDA; reads its version file, since importing it takes long."""
    found = util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    return _names_cuda(Path(found.origin).with_name("version.py"))


def _names_cuda(version: Path) -> bool:
    # A torch without the file is of an unknown kind; a worker will see.
    return not version.is_file() or re.search(r"^cuda\b[^=]*= *['\"]", version.read_text(), re.MULTILINE) is not None


@cache
def _installed_gpus() -> int:
    # The driver lists all of the machine's, also in a container that was given some of them, or none.
    if given := sum(map(_is_given, _NVIDIA_GPUS.glob("*/information"))):
        return given
    # NVIDIA's library makes the device files that a machine lacks after its start. The Windows Subsystem for Linux has
    # the library, but not the driver's files.
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0:
        return 0
    try:
        return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        nvml.nvmlShutdown()


def _is_given(information: Path) -> bool:
    """Return whether this process may open a GPU; a group of processes may be denied the use of a device."""
    try:
        minor = re.search(r"^Device Minor:\s*(\d+)", information.read_text(), re.MULTILINE)
    except OSError:
        return False
    return minor is not None and os.access(_DEVICES / f"nvidia{minor[1]}", os.R_OK | os.W_OK)
