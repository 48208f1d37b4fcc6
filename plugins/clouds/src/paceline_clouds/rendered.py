"""Clouds for which jobs are only rendered: Azure Machine Learning and Google Cloud."""

from __future__ import annotations

import os
import shlex
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from paceline.core.environment import HOSTS, NODE_RANK, NODES
from paceline.core.errors import ConfigError
from paceline.launch.launcher import (
    FileSharing,
    LaunchSpec,
    RenderedJob,
    RenderedOnlyError,
    fixed_nodes,
    option,
)
from paceline.launch.node import node_command
from paceline.launch.rendering import refuse_secrets, to_yaml
from paceline.launch.submit import ClusterLauncher

# --- Clouds whose nodes share no directory, or only a bucket, which has no locks and no links ---


RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TF_CONFIG",
)
"""Rank variables that a cloud sets for the one process that it starts on each node."""


def copied_path(path: str, source: Path, called: str) -> str:
    """Return the path of a file relative to a directory that is copied to the nodes.

    Args:
        path: relative to the directory, or absolute.
        called: its name in messages.

    Returns:
        The path; an absolute path of a program, which may exist only in the nodes' image, is unchanged.
    """
    source = source.resolve()
    candidate = Path(os.path.normpath(source / Path(path).expanduser()))
    for file in (candidate, candidate.resolve()):
        if file.is_relative_to(source) and file.is_file():
            return file.relative_to(source).as_posix()
    if Path(path).is_absolute() and not path.endswith(".py"):
        return path
    local_path = Path(path).resolve()
    is_in_source = local_path.is_file() and local_path.is_relative_to(source)
    advice = f"Its path in it is {local_path.relative_to(source)}." if is_in_source else "Copy it into this directory."
    raise ConfigError(f"{called} does not contain {path}, and only its files are copied to the nodes. {advice}")


def without_shared_directory(spec: LaunchSpec, where: str) -> LaunchSpec:
    """Return a task's job on several nodes without recovery, since it can only be resumed after a node is lost."""
    if not spec.is_task or spec.nodes[0] == 1:
        return spec
    if "--recover" not in spec.command:
        return replace(spec, command=(*spec.command, "--recover", "none"))
    recovery = spec.command[spec.command.index("--recover") + 1]
    if recovery != "none":
        raise ConfigError(
            f"--recover {recovery} on several nodes needs a shared directory with locks and links, which --on "
            f"{where} does not have. Leave it out: a stopped run continues from its checkpoints."
        )
    return spec


class RenderedOnlyLauncher(ClusterLauncher):
    """A launcher that writes a job's file, which the cloud's own command submits.

    Attributes:
        owner: whose command it is.
        list_command: lists the jobs.
    """

    owner: ClassVar[str]
    list_command: ClassVar[str]

    @abstractmethod
    def submit_command(self, rendered: RenderedJob) -> str:
        """Return the command that submits the job."""

    def submit(self, rendered: RenderedJob) -> NoReturn:
        raise RenderedOnlyError(
            f"--on {self.name} only writes the job file. Submit it with {self.owner}'s command:\n"
            f"  {self.submit_command(rendered)}"
        )

    def reopen(self, reference: Mapping[str, Any]) -> NoReturn:
        raise ConfigError(f"--on {self.name} keeps no record of jobs. List them with: {self.list_command}.")


# --- ``--on azureml``: the file of a command job for Azure Machine Learning, submitted with ``az ml``


FILE = "job.yaml"
_SCHEMA = "https://azuremlschemas.azureml.ms/latest/commandJob.schema.json"
_RUN = "/azureml/run"  # placeholder of the output that Azure mounts
_OUTPUT = "${{outputs.run}}"


@dataclass(frozen=True, kw_only=True)
class AzureMLOptions:
    """Options of Azure ML jobs."""

    image: str | None = option("Container image.")
    compute: str | None = option("Name of the compute cluster.")
    datastore: str = option("Datastore for the run's directory. Default: workspaceblobstore.", "workspaceblobstore")
    shm_size: str = option("Shared memory of each node. Default: 8g.", "8g")

    def __post_init__(self) -> None:
        for flag, value in (("--image", self.image), ("--compute", self.compute)):
            if not value:
                raise ConfigError(f"--on azureml needs {flag}.")


class AzureML(RenderedOnlyLauncher):
    """A launcher that renders a command job; Azure starts the node's command once on each node."""

    name = "azureml"
    owner = "Azure"
    list_command = "az ml job list"
    rank_launchers = ("torchrun", "agent", "spawn")
    env_styles = ("torch", "none")
    files: ClassVar[FileSharing] = "uploaded"
    default_run = _RUN

    def render(self, spec: LaunchSpec, options: AzureMLOptions | None = None) -> RenderedJob:
        """Render the job's YAML by Azure's schema of command jobs."""
        options = options or AzureMLOptions()
        refuse_secrets(spec.env, "Let the script read it from the workspace's key vault.")
        if spec.run is not None and spec.run != Path(_RUN):
            raise ConfigError(f"--run-dir {spec.run}: Azure mounts the run's directory itself. Leave out --run-dir.")
        nodes = fixed_nodes(spec, "--on azureml")
        job: dict[str, Any] = {
            "$schema": _SCHEMA,
            "type": "command",
            "name": spec.directory.name,
            "display_name": spec.name,
            "code": str(spec.workdir),
            "command": _command(without_shared_directory(spec, self.name)),
            "environment": {"image": options.image},
            "compute": f"azureml:{options.compute}",
            "resources": {"instance_count": nodes, "shm_size": options.shm_size},
        }
        if nodes > 1:
            job["distribution"] = {"type": "pytorch", "process_count_per_instance": 1}
        if spec.env:
            job["environment_variables"] = dict(spec.env)
        if spec.run is not None:
            path = f"azureml://datastores/{options.datastore}/paths/runs/{spec.directory.name}"
            job["outputs"] = {"run": {"type": "uri_folder", "mode": "rw_mount", "path": path}}
        if spec.walltime_s is not None:
            job["limits"] = {"timeout": int(spec.walltime_s)}
        return RenderedJob(spec=spec, options=options, files={FILE: to_yaml(job)})

    def remote_path(self, path: str, options: AzureMLOptions) -> str:
        """Return the path of a file of this directory on the nodes."""
        return copied_path(path, Path.cwd(), "this directory")

    def submit_command(self, rendered: RenderedJob) -> str:
        file = shlex.quote(str(rendered.spec.directory / FILE))
        return f"az ml job create --file {file} --workspace-name WORKSPACE --resource-group GROUP"


def _command(spec: LaunchSpec) -> str:
    """Return a node's shell command, which converts Azure's node rank into Paceline's variables."""
    command = shlex.join(node_command(spec)).replace(_RUN, _OUTPUT)
    if spec.nodes[0] == 1:
        return command
    rank_variables = f'{NODE_RANK}="$NODE_RANK" {NODES}={spec.nodes[0]} {HOSTS}="$MASTER_ADDR"'
    return f"{rank_variables} env {' '.join(f'-u {name}' for name in RANK_VARIABLES)} {command}"


# --- ``--on google``: the file of a custom job for Google's Vertex AI, submitted with ``gcloud`` ---


_BUCKETS = Path("/gcs")


@dataclass(frozen=True, kw_only=True)
class GoogleOptions:
    """Options of Vertex AI jobs."""

    image: str | None = option("Container image.")
    machine_type: str | None = option("Machine type of the nodes, such as a2-highgpu-4g.")
    accelerator: str | None = option("GPU type, such as NVIDIA_TESLA_A100; their number is --gpus-per-node.")
    service_account: str | None = option("Service account of the nodes.")
    region: str | None = option("Region. Default: gcloud's.")

    def __post_init__(self) -> None:
        for flag, value in (("--image", self.image), ("--machine-type", self.machine_type)):
            if not value:
                raise ConfigError(f"--on google needs {flag}.")


class Google(RenderedOnlyLauncher):
    """A launcher that renders a custom job: worker pool 0 is the first node, pool 1 the others."""

    name = "google"
    owner = "Google"
    list_command = "gcloud ai custom-jobs list"
    rank_launchers = ("torchrun", "agent", "spawn")
    files: ClassVar[FileSharing] = "image"

    def render(self, spec: LaunchSpec, options: GoogleOptions | None = None) -> RenderedJob:
        options = options or GoogleOptions()
        refuse_secrets(spec.env, "Let the script read it from Secret Manager.")
        fixed_nodes(spec, "--on google")
        if bool(options.accelerator) != bool(spec.gpus_per_node):
            raise ConfigError("--accelerator TYPE and --gpus-per-node N need each other: give both, or neither.")
        if spec.run is not None and not spec.run.is_relative_to(_BUCKETS):
            raise ConfigError(f"--run-dir must be in a bucket, /gcs/BUCKET/..., but is {spec.run}.")
        spec = without_shared_directory(spec, self.name)
        machine: dict[str, Any] = {"machineType": options.machine_type}
        if options.accelerator:
            machine |= {"acceleratorType": options.accelerator, "acceleratorCount": spec.gpus_per_node}
        unset = [word for name in RANK_VARIABLES for word in ("-u", name)]
        container: dict[str, Any] = {
            "imageUri": options.image,
            "command": ["env", *unset, *node_command(spec)],
        }
        if spec.env:
            container["env"] = [{"name": name, "value": value} for name, value in spec.env.items()]
        pools = [
            {"machineSpec": machine, "replicaCount": count, "containerSpec": container}
            for count in (1, spec.nodes[0] - 1)
            if count
        ]
        job: dict[str, Any] = {"workerPoolSpecs": pools}
        if spec.walltime_s is not None:
            job["scheduling"] = {"timeout": f"{int(spec.walltime_s)}s"}
        if options.service_account is not None:
            job["serviceAccount"] = options.service_account
        return RenderedJob(spec=spec, options=options, files={FILE: to_yaml(job)})

    def submit_command(self, rendered: RenderedJob) -> str:
        spec = rendered.spec
        return (
            f"gcloud ai custom-jobs create --region={rendered.options.region or 'REGION'} "
            f"--display-name={spec.directory.name} --config={shlex.quote(str(spec.directory / FILE))}"
        )
