"""Clouds whose job is only rendered: Azure Machine Learning and Google Cloud."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from paceline.core.environment import HOSTS, NODE_RANK, NODES
from paceline.core.errors import ConfigError
from paceline.launch.launcher import (
    FileSharing,
    JobHandle,
    Launcher,
    LaunchSpec,
    RenderedJob,
    RenderedOnlyError,
    option,
)
from paceline.launch.node import node_command
from paceline.launch.rendering import refuse_secrets, to_yaml

# --- Clouds whose machines share no directory, or one that is a bucket: no locks, no links, and late ---


RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TF_CONFIG",
)
"""What a cloud tells the one process that it starts on each machine, as if it were a rank."""


def fixed_nodes(spec: LaunchSpec, where: str) -> None:
    """Refuse machines that come and go.

    Raises:
        ConfigError: they were asked for.
    """
    if spec.nodes[0] != spec.nodes[1]:
        raise ConfigError(f"--nodes MIN:MAX does not work with --on {where}: a job keeps its machines.")


def copied_path(path: str, source: Path, called: str) -> str:
    """Where the machines find a file, relative to a directory that each of them is given a copy of.

    Args:
        path: of the file, from there; or an absolute one.
        source: the directory.
        called: what messages call it.

    Returns:
        The path; an absolute one as it is where it is a program that only the machines' image may have.

    Raises:
        ConfigError: the directory has no such file.
    """
    source = source.resolve()
    given = Path(os.path.normpath(source / Path(path).expanduser()))
    for file in (given, given.resolve()):
        if file.is_relative_to(source) and file.is_file():
            return file.relative_to(source).as_posix()
    if Path(path).is_absolute() and not path.endswith(".py"):
        return path
    here = Path(path).resolve()
    meant = here.is_file() and here.is_relative_to(source)
    advice = f"From there it is {here.relative_to(source)}." if meant else "Put it there."
    raise ConfigError(f"there is no file {path} in {called}, and the machines get a copy of that alone. {advice}")


def without_shared_directory(spec: LaunchSpec, where: str) -> LaunchSpec:
    """A task's job on several machines, which cannot survive the loss of one: it is resumed.

    Raises:
        ConfigError: another recovery was asked for.
    """
    if not spec.is_task or spec.nodes[0] == 1:
        return spec
    if "--recover" not in spec.command:
        return replace(spec, command=(*spec.command, "--recover", "none"))
    asked = spec.command[spec.command.index("--recover") + 1]
    if asked != "none":
        raise ConfigError(
            f"--recover {asked} on several machines needs a directory that they share, with locks and links; "
            f"--on {where} has none. Leave it out: a run that was stopped goes on from its checkpoints."
        )
    return spec


# --- ``--on azureml``: the file of a command job for Azure Machine Learning, which its own ``az ml``
#     submits


FILE = "job.yaml"
_SCHEMA = "https://azuremlschemas.azureml.ms/latest/commandJob.schema.json"
_RUN = "/azureml/run"  # stands for the output until Azure has mounted it
_OUTPUT = "${{outputs.run}}"


@dataclass(frozen=True, kw_only=True)
class AzureMLOptions:
    """Options of Azure ML jobs."""

    image: str | None = option("The container image.")
    compute: str | None = option("The compute cluster's name.")
    datastore: str = option("Datastore for the run's directory. Default: workspaceblobstore.", "workspaceblobstore")
    shm_size: str = option("Shared memory of each machine. Default: 8g.", "8g")

    def __post_init__(self) -> None:
        for flag, value in (("--image", self.image), ("--compute", self.compute)):
            if not value:
                raise ConfigError(f"--on azureml needs {flag}.")


class AzureML(Launcher):
    """Renders a command job; Azure starts the node's command once on each machine."""

    name = "azureml"
    rank_launchers = ("torchrun", "agent", "spawn")
    env_styles = ("torch", "none")
    files: ClassVar[FileSharing] = "uploaded"
    default_run = _RUN

    def render(self, spec: LaunchSpec, options: AzureMLOptions | None = None) -> RenderedJob:
        """Render the job's YAML, by Azure's schema of command jobs."""
        options = options or AzureMLOptions()
        refuse_secrets(spec.env, "Let the script read it from the workspace's key vault.")
        fixed_nodes(spec, self.name)
        if spec.run is not None and spec.run != Path(_RUN):
            raise ConfigError(f"--run-dir {spec.run}: Azure mounts the run's directory. Leave out --run-dir.")
        nodes, _ = spec.nodes
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
        """Where the machines find a file of this directory."""
        return copied_path(path, Path.cwd(), "this directory")

    def submit(self, rendered: RenderedJob) -> NoReturn:
        """Say how Azure's own command submits it.

        Raises:
            RenderedOnlyError: always.
        """
        raise RenderedOnlyError(
            f"--on azureml writes the job; Azure's own command submits it:\n"
            f"  az ml job create --file {shlex.quote(str(rendered.spec.directory / FILE))} "
            "--workspace-name WORKSPACE --resource-group GROUP"
        )

    def reopen(self, reference: Mapping[str, Any]) -> JobHandle:
        """No job is submitted, so there is none to find."""
        raise ConfigError("--on azureml keeps no jobs. Look there: az ml job list.")


def _command(spec: LaunchSpec) -> str:
    """What a shell runs on each machine: Azure's word for which one it is, in Paceline's variables."""
    command = shlex.join(node_command(spec)).replace(_RUN, _OUTPUT)
    if spec.nodes[0] == 1:
        return command
    place = f'{NODE_RANK}="$NODE_RANK" {NODES}={spec.nodes[0]} {HOSTS}="$MASTER_ADDR"'
    return f"{place} env {' '.join(f'-u {name}' for name in RANK_VARIABLES)} {command}"


# --- ``--on google``: the file of a custom job for Google's Vertex AI, which its own ``gcloud`` submits ---


_BUCKETS = Path("/gcs")


@dataclass(frozen=True, kw_only=True)
class GoogleOptions:
    """Options of Vertex AI jobs."""

    image: str | None = option("The container image.")
    machine_type: str | None = option("The machines' type, such as a2-highgpu-4g.")
    accelerator: str | None = option("The GPUs' type, such as NVIDIA_TESLA_A100; --gpus-per-node says how many.")
    service_account: str | None = option("The service account of the machines.")
    region: str | None = option("The region. Default: gcloud's.")

    def __post_init__(self) -> None:
        for flag, value in (("--image", self.image), ("--machine-type", self.machine_type)):
            if not value:
                raise ConfigError(f"--on google needs {flag}.")


class Google(Launcher):
    """Renders a custom job: worker pool 0 is the first machine, pool 1 the others."""

    name = "google"
    rank_launchers = ("torchrun", "agent", "spawn")
    files: ClassVar[FileSharing] = "image"

    def render(self, spec: LaunchSpec, options: GoogleOptions | None = None) -> RenderedJob:
        """Render the CustomJobSpec as YAML."""
        options = options or GoogleOptions()
        refuse_secrets(spec.env, "Let the script read it from Secret Manager.")
        fixed_nodes(spec, self.name)
        if bool(options.accelerator) != bool(spec.gpus_per_node):
            raise ConfigError("--accelerator TYPE and --gpus-per-node N belong together: give both, or neither.")
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

    def submit(self, rendered: RenderedJob) -> NoReturn:
        """Say how Google's own command submits it.

        Raises:
            RenderedOnlyError: always.
        """
        region = rendered.options.region or "REGION"
        raise RenderedOnlyError(
            f"--on google writes the job; Google's own command submits it:\n"
            f"  gcloud ai custom-jobs create --region={region} --display-name={rendered.spec.directory.name} "
            f"--config={shlex.quote(str(rendered.spec.directory / FILE))}"
        )

    def reopen(self, reference: Mapping[str, Any]) -> JobHandle:
        """No job is submitted, so there is none to find."""
        raise ConfigError("--on google keeps no jobs. Look there: gcloud ai custom-jobs list.")
