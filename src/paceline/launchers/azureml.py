"""``--on azureml``: the file of a command job for Azure Machine Learning, which its own ``az ml`` submits."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from paceline.distributed.machine_place import HOSTS, NODE_RANK, NODES
from paceline.errors import ConfigError
from paceline.launchers.base import Files, JobHandle, JobSpec, Launcher, Rendered, RenderedOnlyError, option
from paceline.launchers.node import node_command
from paceline.launchers.secret_variables import refuse_secrets
from paceline.launchers.unshared import (
    RANK_VARIABLES,
    copied_path,
    fixed_machines,
    without_shared_directory,
)
from paceline.launchers.yaml_text import to_yaml

FILE = "job.yaml"
_SCHEMA = "https://azuremlschemas.azureml.ms/latest/commandJob.schema.json"
_RUN = "/azureml/run"  # stands for the output until Azure has mounted it
_OUTPUT = "${{outputs.run}}"


@dataclass(frozen=True, kw_only=True)
class AzureMLOptions:
    """Options of Azure ML jobs."""

    image: str | None = option("The container image.")
    compute: str | None = option("The compute cluster's name.")
    datastore: str = option(
        "Where the run's directory is kept. Default: workspaceblobstore.", "workspaceblobstore"
    )
    shm_size: str = option("Shared memory of each machine. Default: 8g.", "8g")

    def __post_init__(self) -> None:
        for flag, value in (("--image", self.image), ("--compute", self.compute)):
            if not value:
                raise ConfigError(f"--on azureml needs {flag}.")


class AzureML(Launcher):
    """Renders a command job; Azure starts the node's command once on each machine."""

    name = "azureml"
    inners = ("torchrun", "agent", "spawn")
    contracts = ("torch", "none")
    files: ClassVar[Files] = "uploaded"
    default_run = _RUN

    def render(self, spec: JobSpec, options: AzureMLOptions | None = None) -> Rendered:
        """Render the job's YAML, by Azure's schema of command jobs."""
        options = options or AzureMLOptions()
        refuse_secrets(spec.env, "Let the script read it from the workspace's key vault.")
        fixed_machines(spec, self.name)
        if spec.run is not None and spec.run != Path(_RUN):
            raise ConfigError(f"--run {spec.run}: Azure mounts the run's directory. Leave out --run.")
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
        return Rendered(spec=spec, options=options, files={FILE: to_yaml(job)})

    def place_of(self, path: str, options: AzureMLOptions) -> str:
        """Where the machines find a file of this directory."""
        return copied_path(path, Path.cwd(), "this directory")

    def submit(self, rendered: Rendered) -> NoReturn:
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


def _command(spec: JobSpec) -> str:
    """What a shell runs on each machine: Azure's word for which one it is, in Paceline's variables."""
    command = shlex.join(node_command(spec)).replace(_RUN, _OUTPUT)
    if spec.nodes[0] == 1:
        return command
    place = f'{NODE_RANK}="$NODE_RANK" {NODES}={spec.nodes[0]} {HOSTS}="$MASTER_ADDR"'
    return f"{place} env {' '.join(f'-u {name}' for name in RANK_VARIABLES)} {command}"
