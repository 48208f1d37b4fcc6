"""``--on kubernetes``: a TrainJob of Kubeflow Trainer, a JobSet, or an indexed Job."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.errors import LaunchError
from paceline.launchers.base import Files, JobHandle, JobSpec, Launcher, Rendered
from paceline.launchers.kubernetes.api import Cluster
from paceline.launchers.kubernetes.job import KubernetesJob
from paceline.launchers.kubernetes.manifests import Manifest, manifests
from paceline.launchers.kubernetes.options import KubernetesOptions
from paceline.launchers.yaml_text import to_yaml


@dataclass(frozen=True, kw_only=True)
class RenderedKubernetes(Rendered):
    """Objects to make, in this order; the job itself comes last."""

    objects: tuple[Manifest, ...]


class Kubernetes(Launcher):
    """Submits to the API server of a cluster."""

    name = "kubernetes"
    inners = ("torchrun", "agent", "spawn")
    files: ClassVar[Files] = "image"
    extra = "kubernetes"

    def render(self, spec: JobSpec, options: KubernetesOptions | None = None) -> RenderedKubernetes:
        """Render the manifests, as one file that ``kubectl apply -f`` takes too."""
        options = options or KubernetesOptions()
        objects = tuple(manifests(spec, options))
        text = "---\n".join(map(to_yaml, objects))
        return RenderedKubernetes(spec=spec, options=options, files={"job.yaml": text}, objects=objects)

    def submit(self, rendered: Rendered) -> JobHandle:
        """Make the objects; the job owns the others, which go when it goes."""
        assert isinstance(rendered, RenderedKubernetes)
        options: KubernetesOptions = rendered.options
        cluster = Cluster(options.namespace, options.context)
        made: list[Manifest] = []
        try:
            for manifest in rendered.objects:
                made.append(cluster.create(manifest))
            *others, job = made
            for other in others:
                owner = {"apiVersion": job["apiVersion"], "kind": job["kind"]}
                owner |= {key: job["metadata"][key] for key in ("name", "uid")}
                change = {"metadata": {"ownerReferences": [owner]}}
                cluster.patch(other["kind"], other["metadata"]["name"], change)
        except (LaunchError, KeyboardInterrupt):
            for manifest in reversed(made):
                with suppress(LaunchError):
                    cluster.delete(manifest["kind"], manifest["metadata"]["name"])
            raise
        reference = {
            "id": job["metadata"]["name"],
            "kind": job["kind"],
            "namespace": options.namespace,
            "context": options.context,
            "nodes": list(rendered.spec.nodes),
        }
        return KubernetesJob(reference, cluster)

    def reopen(self, reference: Mapping[str, Any]) -> JobHandle:
        """Find the job again by its name."""
        return KubernetesJob(reference)
