"""``--on kubernetes``: a TrainJob of Kubeflow Trainer, a JobSet, or an indexed Job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from paceline.core.errors import ConfigError, LaunchError
from paceline.core.signals import interrupt_at_exit
from paceline.launch.kubernetes_api import KubernetesApiError, KubernetesCluster, KubernetesJob
from paceline.launch.kubernetes_manifests import Manifest, manifests
from paceline.launch.launcher import FileSharing, JobHandle, Launcher, LaunchSpec, RenderedJob
from paceline.launch.options import KubernetesOptions
from paceline.launch.rendering import to_yaml


@dataclass(frozen=True, kw_only=True)
class RenderedKubernetes(RenderedJob):
    """Objects to make, in this order; the job itself comes last."""

    objects: tuple[Manifest, ...]


class Kubernetes(Launcher):
    """Submits to the API server of a cluster."""

    name = "kubernetes"
    rank_launchers = ("torchrun", "agent", "spawn")
    files: ClassVar[FileSharing] = "image"
    extra = "kubernetes"

    def render(self, spec: LaunchSpec, options: KubernetesOptions | None = None) -> RenderedKubernetes:
        """Render the manifests, as one file that ``kubectl apply -f`` takes too."""
        options = options or KubernetesOptions()
        objects = tuple(manifests(spec, options))
        text = "---\n".join(map(to_yaml, objects))
        return RenderedKubernetes(spec=spec, options=options, files={"job.yaml": text}, objects=objects)

    def common_directory(self, spec: LaunchSpec, options: KubernetesOptions) -> Path | None:
        """The run's, or one of the job's own in the first volume."""
        if spec.run is not None:
            return spec.run
        for path in options.claims().values():
            return Path(path, "jobs", spec.directory.name)
        if spec.nodes[1] == 1:
            return None
        raise ConfigError(
            "--preflight with --nodes above 1: the pods meet in a directory that all of them can write. Give "
            "--volume CLAIM:/PATH, the first one if there are several; or leave --preflight out."
        )

    def submit(self, rendered: RenderedJob) -> JobHandle:
        """Make the objects; the job owns the others, which go when it goes."""
        assert isinstance(rendered, RenderedKubernetes)
        options: KubernetesOptions = rendered.options
        cluster = KubernetesCluster(options.namespace, options.context)
        begun: list[Manifest] = []
        made: list[Manifest] = []
        try:
            for manifest in rendered.objects:
                begun.append(manifest)
                with interrupt_at_exit():
                    made.append(_made(cluster, manifest))
            *others, job = made
            for other in others:
                owner = {"apiVersion": job["apiVersion"], "kind": job["kind"]}
                owner |= {key: job["metadata"][key] for key in ("name", "uid")}
                change = {"metadata": {"ownerReferences": [owner]}}
                cluster.patch(other["kind"], other["metadata"]["name"], change)
        except (LaunchError, KeyboardInterrupt) as error:
            refused = isinstance(error, KubernetesApiError) and not error.lost
            uncertain = [] if refused else begun[len(made) :]
            _delete(cluster, [*uncertain, *reversed(made)], error)
            raise
        reference = {
            "id": job["metadata"]["name"],
            "kind": job["kind"],
            "namespace": options.namespace,
            "context": cluster.context,
            "server": cluster.server,
            "nodes": list(rendered.spec.nodes),
        }
        return KubernetesJob(reference, cluster)

    def reopen(self, reference: Mapping[str, Any]) -> JobHandle:
        """Find the job again by its name."""
        return KubernetesJob(reference)


def _made(cluster: KubernetesCluster, manifest: Manifest) -> Manifest:
    """The object as the server keeps it, also where the answer to its making was lost.

    Raises:
        Refused: with the server's own words.
    """
    try:
        return cluster.create(manifest)
    except KubernetesApiError as error:
        there = None
        if error.lost:
            with suppress(KubernetesApiError):
                there = cluster.get(manifest["kind"], manifest["metadata"]["name"])
        if there is None:
            raise
        return there


def _delete(cluster: KubernetesCluster, objects: Sequence[Manifest], error: BaseException) -> None:
    """Delete what there is of a job that could not be submitted.

    Raises:
        LaunchError: some of it may be left; the message says how it is deleted.
    """
    left = []
    for manifest in objects:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        try:
            cluster.delete(kind, name)
        except LaunchError:
            left.append(f"{kind.lower()}/{name}")
    if left:
        context = f" --context {cluster.context}" if cluster.context else ""
        raise LaunchError(
            f"{str(error) or 'interrupted.'} The job may be there, and could not be deleted. Do so: "
            f"kubectl delete --ignore-not-found --namespace {cluster.namespace}{context} {' '.join(left)}"
        ) from error
