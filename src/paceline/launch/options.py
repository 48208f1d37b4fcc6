"""Each launcher's own command-line options, in addition to those of all launchers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from paceline.core.errors import ConfigError
from paceline.core.options import parse_duration_s
from paceline.launch.registry import option

# --- ``--on spawn`` and ``--on torchrun`` ---


@dataclass(frozen=True, kw_only=True)
class RendezvousOptions:
    """The rendezvous of several nodes, on each of which the same command is run."""

    node_rank: int | None = option("This node's number, 0 to nodes - 1.")
    rdzv_endpoint: str | None = option("HOST:PORT of node 0, for the rendezvous of several nodes.")
    rdzv_id: str = option("A name that all nodes of one job share.", "paceline")


@dataclass(frozen=True, kw_only=True)
class TorchrunOptions(RendezvousOptions):
    """Further options of torchrun."""

    rdzv_backend: str = option("Rendezvous of the agents on several nodes: c10d, or static with fixed ranks.", "c10d")


TORCHRUN_EQUALS = {
    "nproc-per-node": "--nproc",
    "nnodes": "--nodes",
    "master-addr": "--rdzv-endpoint HOST:PORT",
    "master-port": "--rdzv-endpoint HOST:PORT, or on one node --master-port",
    "standalone": "no option: on one node each job has a rendezvous of its own",
    "use-env": "no option: LOCAL_RANK is always set",
    "no-python": "no option: the command may be any program",
    "module": "-m MODULE after --",
    "signals-to-handle": "no option: the agent handles all that ask a job to stop",
    **{name: f"--{name}" for name in ("node-rank", "rdzv-endpoint", "rdzv-id", "rdzv-backend", "max-restarts")},
}
"""torchrun's options that have an equal, and what to give instead."""

TORCHRUN_OTHERS = (
    *("tee", "redirects", "log-dir", "role", "rdzv-conf", "local-ranks-filter", "monitor-interval", "start-method"),
    *("event-log-handler", "logs-specs", "local-addr", "numa-binding", "shutdown-timeout", "virtual-local-rank"),
    *("duplicate-stdout-filters", "duplicate-stderr-filters"),
)
"""torchrun's options that ``--torchrun`` passes on."""


def torchrun_equal(text: str) -> str | None:
    """Return a sentence on an option of torchrun's, such as ``--nproc_per_node``; None for any other."""
    text = text.partition("=")[0]
    name = text.lstrip("-").replace("_", "-")
    if name in TORCHRUN_OTHERS:
        return f"{text} is torchrun's. Give it as --torchrun {name}=VALUE."
    equal = TORCHRUN_EQUALS.get(name)
    return None if equal is None or text == equal else f"{text} is torchrun's. Use {equal}."


# --- ``--on slurm`` ---


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """Options of sbatch, in addition to nodes, processes, GPUs, CPUs and time."""

    partition: str | None = option("Partition, or several, comma-separated.")
    account: str | None = option("Account to charge.")
    qos: str | None = option("Quality of service.")
    constraint: str | None = option("Required features of the nodes, such as a100.")
    exclude: str | None = option("Nodes to exclude, such as gpu[03-04].")
    exclusive: bool = option("Use the nodes exclusively, with all their CPUs.", False)
    mem: str | None = option("Memory of each node, such as 64G.")
    comment: str | None = option("A comment, which some sites require.")
    output: str | None = option(
        "Log file, with sbatch's %j, %x, %A, %a and so on. Default: slurm-%j.log in the job's directory."
    )
    error: str | None = option("Separate log file of stderr.")
    module: tuple[str, ...] = option("Environment module to load; may be repeated.", ())
    conda: str | None = option("Conda environment to activate; its python is used.")
    venv: str | None = option("Virtual environment to activate; its python is used.")
    setup: tuple[str, ...] = option(
        "Shell line to run on node 0 after --module, --conda and --venv, or before if it is module purge or use; "
        "may be repeated.",
        (),
    )
    signal_before: str | None = option(
        "Send SIGUSR1 this long before the time limit. Default: for tasks, a tenth of the walltime, at most 2min."
    )
    requeue: bool = option(
        "Requeue after preemption, a timeout (exit code 75) or a lost node. Default: for tasks.",
        False,
    )
    no_requeue: bool = option("Never requeue.", False)
    array: str | None = option(
        "Run the job for each of 0-9 or 1,3,7%2; {array_index} is replaced in the command and in --run-dir."
    )
    slurm: tuple[str, ...] = option("KEY=VALUE or KEY for sbatch; may be repeated.", ())

    def __post_init__(self) -> None:
        if self.requeue and self.no_requeue:
            raise ConfigError("--requeue and --no-requeue contradict each other. Give one of them.")
        if self.conda is not None and self.venv is not None:
            raise ConfigError("--conda and --venv: only one environment can be active. Give one of them.")


# --- ``--on kubernetes`` ---


KINDS = ("trainjob", "jobset", "job")

_LABEL_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL = re.compile(rf"(?:[a-z0-9.-]+/)?{_LABEL_NAME}=(?:{_LABEL_NAME})?")
_SECRET = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([a-z0-9.-]+)/([A-Za-z0-9._-]+)")
_CLAIM = re.compile(r"([a-z0-9](?:[a-z0-9.-]*[a-z0-9])?):(/.+)")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?")
_TOLERATION = re.compile(
    rf"((?:[a-z0-9.-]+/)?{_LABEL_NAME})(?:=({_LABEL_NAME}|))?(?::(NoSchedule|PreferNoSchedule|NoExecute))?"
)
_RESOURCE = re.compile(rf"((?:[a-z0-9.-]+/)?{_LABEL_NAME})=([0-9]+(?:m|[kMGTPE]|[KMGTPE]i)?)")
_OBJECT_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


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
    workdir: str | None = option("Working directory in the image. Default: the image's own.")
    grace: str = option("How long a pod may take to save when it is stopped. Default: 5min.", "5min")
    runtime: str | None = option("An existing ClusterTrainingRuntime. Default: create one for the job.")

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"--kind must be one of {', '.join(KINDS)}, but is {self.kind!r}.")
        if not self.image:
            raise ConfigError("--on kubernetes needs --image, a container image that contains Paceline.")
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", self.namespace):
            raise ConfigError(f"--namespace must be lower-case letters, digits and -, but is {self.namespace!r}.")
        if self.memory is not None and not _QUANTITY.fullmatch(self.memory):
            raise ConfigError(f"--memory must be a quantity such as 64Gi, but is {self.memory!r}.")
        if self.runtime is not None and self.kind != "trainjob":
            raise ConfigError(f"--runtime is only for --kind trainjob, but --kind is {self.kind}.")
        if self.workdir is not None and self.runtime is not None:
            raise ConfigError("--workdir cannot be combined with --runtime, which has its own. Leave one of them out.")
        self.claims()
        self.secrets()
        self.labels()
        self.selector()
        self.tolerations()
        self.resources()
        for name in self.image_pull_secret:
            if not _OBJECT_NAME.fullmatch(name):
                raise ConfigError(f"--image-pull-secret must be the name of a secret, but is {name!r}.")
        if self.priority_class is not None and not _OBJECT_NAME.fullmatch(self.priority_class):
            raise ConfigError(f"--priority-class must be the name of a class, but is {self.priority_class!r}.")
        if self.grace_s() < 1:
            raise ConfigError(f"--grace must be at least 1s, but is {self.grace!r}.")

    def claims(self) -> dict[str, str]:
        """Return the mount point of each persistent volume claim."""
        return parse_claims(self.volume)

    def secrets(self) -> dict[str, tuple[str, str]]:
        """Return the secret and its key of each variable."""
        secrets = {}
        for word in self.secret:
            match = _SECRET.fullmatch(word)
            if match is None:
                raise ConfigError(f"--secret must be VARIABLE=SECRET/KEY, such as HF_TOKEN=hub/token, but is {word!r}.")
            secrets[match[1]] = (match[2], match[3])
        return secrets

    def labels(self) -> dict[str, str]:
        """Return the labels of all created objects."""
        return _pairs("--label", self.label)

    def selector(self) -> dict[str, str]:
        """Return the labels of the nodes to run on."""
        return _pairs("--node-selector", self.node_selector)

    def tolerations(self) -> list[dict[str, str]]:
        """Return the tolerations of the pods."""
        tolerations = []
        for word in self.toleration:
            match = _TOLERATION.fullmatch(word)
            if match is None:
                raise ConfigError(
                    "--toleration must be KEY[=VALUE][:EFFECT], such as gpu=a100:NoSchedule (or PreferNoSchedule, "
                    f"NoExecute), but is {word!r}."
                )
            key, value, effect = match.groups()
            operator = {"operator": "Exists"} if value is None else {"operator": "Equal", "value": value}
            tolerations.append({"key": key, **operator, **({} if effect is None else {"effect": effect})})
        return tolerations

    def resources(self) -> dict[str, str]:
        """Return the further resources of each pod."""
        resources = {}
        for word in self.resource:
            match = _RESOURCE.fullmatch(word)
            if match is None:
                raise ConfigError(f"--resource must be NAME=COUNT, such as rdma/hca=1, but is {word!r}.")
            resources[match[1]] = match[2]
        return resources

    def grace_s(self) -> int:
        """Return the seconds between SIGTERM and SIGKILL."""
        return int(parse_duration_s(self.grace, "grace"))

    def holds(self, path: PurePosixPath) -> bool:
        """Return whether a path is in one of the volumes."""
        return any(path.is_relative_to(mount) for mount in self.claims().values())


def parse_claims(words: Iterable[str]) -> dict[str, str]:
    """Parse CLAIM:/PATH into the mount point of each persistent volume claim.

    Raises:
        ConfigError: a word has another form, or repeats a claim or path.
    """
    claims: dict[str, str] = {}
    for word in words:
        match = _CLAIM.fullmatch(word)
        if match is None:
            raise ConfigError(f"--volume must be CLAIM:/PATH, such as runs:/runs, but is {word!r}.")
        if match[1] in claims or match[2] in claims.values():
            raise ConfigError(f"--volume {word} repeats a claim or a path. Give each once.")
        claims[match[1]] = match[2]
    return claims


def _pairs(flag: str, words: Iterable[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in words:
        if not _LABEL.fullmatch(word):
            raise ConfigError(f"{flag} must be KEY=VALUE in the form of Kubernetes labels, but is {word!r}.")
        key, _, value = word.partition("=")
        pairs[key] = value
    return pairs


# --- ``--on sagemaker`` ---


DISTRIBUTIONS = {
    "pytorchddp": "sagemaker_pytorch_ddp_enabled",
    "torch_distributed": "sagemaker_torch_distributed_enabled",
    "smdistributed": "sagemaker_distributed_dataparallel_enabled",
}
"""SageMaker's own ways to start the ranks, and their names in its training toolkit."""


@dataclass(frozen=True, kw_only=True)
class SageMakerOptions:
    """Options of SageMaker jobs."""

    image: str | None = option("Container image.")
    role: str | None = option("ARN of the job's role.")
    instance_type: str | None = option("Instance type of the nodes, such as ml.p4d.24xlarge.")
    s3: str | None = option("s3://BUCKET/PREFIX for the source, checkpoints and output.")
    source: str = option("Directory to copy to the nodes; script paths are relative to it. Default: this one.", ".")
    checkpoints: str | None = option(
        "s3://BUCKET/PREFIX of the run's directory; use the same one to continue a run. Default: below --s3."
    )
    spot: bool = option("Use spot instances; the run continues from its checkpoints.", False)
    max_wait: str = option("Extra time that a spot job may wait for instances. Default: 24h.", "24h")
    distribution: str | None = option(
        "pytorchddp, torch_distributed or smdistributed: let SageMaker's image start a script's ranks."
    )
    volume_gb: int = option("Disk of each node, in GB. Default: 30.", 30)
    tag: tuple[str, ...] = option("KEY=VALUE, for the job; may be repeated.", ())
    region: str | None = option("AWS region. Default: the configured one.")

    def __post_init__(self) -> None:
        for flag, value, example in (
            (
                "--image",
                self.image,
                "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.6.0-gpu-py312",
            ),
            ("--role", self.role, "arn:aws:iam::123456789012:role/training"),
            ("--instance-type", self.instance_type, "ml.g5.12xlarge"),
            ("--s3", self.s3, "s3://my-bucket/training"),
        ):
            if not value:
                raise ConfigError(f"--on sagemaker needs {flag}, such as {example}.")
        if not re.fullmatch(r"arn:aws[a-z-]*:iam::\d{12}:role/.+", self.role or ""):
            raise ConfigError(f"--role must be such as arn:aws:iam::123456789012:role/NAME, but is {self.role!r}.")
        if not re.fullmatch(r"ml\.[a-z0-9-]+\.[a-z0-9-]+", self.instance_type or ""):
            raise ConfigError(f"--instance-type must be such as ml.g5.12xlarge, but is {self.instance_type!r}.")
        for flag, value in (("--s3", self.s3), ("--checkpoints", self.checkpoints)):
            if value is not None and not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{2,62}(/.*)?", value):
                raise ConfigError(
                    f"{flag} must be s3://BUCKET/PREFIX, with a bucket of 3 to 63 characters, but is {value!r}."
                )
        if self.distribution is not None and self.distribution not in DISTRIBUTIONS:
            raise ConfigError(
                f"--distribution must be one of {', '.join(DISTRIBUTIONS)}, but is {self.distribution!r}."
            )
        if self.volume_gb < 1:
            raise ConfigError(f"--volume-gb must be at least 1, but is {self.volume_gb}.")
        self.max_wait_s()
        self.tags()

    def max_wait_s(self) -> int:
        """Return the seconds that a spot job may wait for instances, over all interruptions."""
        return int(parse_duration_s(self.max_wait, "max_wait"))

    def tags(self) -> list[dict[str, str]]:
        """Return the tags in the API's form."""
        pairs = [word.partition("=") for word in self.tag]
        for key, equals, value in pairs:
            if not key or not equals:
                raise ConfigError(f"--tag must be KEY=VALUE, but is {key + equals + value!r}.")
        return [{"Key": key, "Value": value} for key, _, value in pairs]
