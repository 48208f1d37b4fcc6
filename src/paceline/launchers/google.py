"""``--on google``: the file of a custom job for Google's Vertex AI, which its own ``gcloud`` submits."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from paceline.errors import ConfigError
from paceline.launchers.base import Files, JobHandle, JobSpec, Launcher, Rendered, RenderedOnlyError, option
from paceline.launchers.node import node_command
from paceline.launchers.secret_variables import refuse_secrets
from paceline.launchers.unshared import RANK_VARIABLES, fixed_machines, without_shared_directory
from paceline.launchers.yaml_text import to_yaml

FILE = "job.yaml"
_BUCKETS = Path("/gcs")


@dataclass(frozen=True, kw_only=True)
class GoogleOptions:
    """Options of Vertex AI jobs."""

    image: str | None = option("The container image.")
    machine_type: str | None = option("The machines' type, such as a2-highgpu-4g.")
    accelerator: str | None = option(
        "The GPUs' type, such as NVIDIA_TESLA_A100; --gpus-per-node says how many."
    )
    service_account: str | None = option("The service account that the machines act as.")
    region: str | None = option("The region. Default: the one that gcloud is configured for.")

    def __post_init__(self) -> None:
        for flag, value in (("--image", self.image), ("--machine-type", self.machine_type)):
            if not value:
                raise ConfigError(f"--on google needs {flag}.")


class Google(Launcher):
    """Renders a custom job: worker pool 0 is the first machine, pool 1 the others."""

    name = "google"
    inners = ("torchrun", "agent", "spawn")
    files: ClassVar[Files] = "image"

    def render(self, spec: JobSpec, options: GoogleOptions | None = None) -> Rendered:
        """Render the CustomJobSpec as YAML."""
        options = options or GoogleOptions()
        refuse_secrets(spec.env, "Let the script read it from Secret Manager.")
        fixed_machines(spec, self.name)
        if bool(options.accelerator) != bool(spec.gpus_per_node):
            raise ConfigError(
                "--accelerator TYPE and --gpus-per-node N belong together: give both, or neither."
            )
        if spec.run is not None and not spec.run.is_relative_to(_BUCKETS):
            raise ConfigError(f"--run must be in a bucket, /gcs/BUCKET/..., but is {spec.run}.")
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
        return Rendered(spec=spec, options=options, files={FILE: to_yaml(job)})

    def submit(self, rendered: Rendered) -> NoReturn:
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
