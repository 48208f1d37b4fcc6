"""``--on kubernetes``: a TrainJob of Kubeflow Trainer, a JobSet, or an indexed Job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from paceline.core.errors import LaunchError
from paceline.core.signals import interrupt_at_exit
from paceline.launch.launcher import FileSharing, JobHandle, LaunchSpec, RenderedJob
from paceline.launch.rendering import to_yaml
from paceline.launch.submit import ClusterLauncher
from paceline_kubernetes.api import KubernetesApiError, KubernetesCluster, KubernetesJob
from paceline_kubernetes.manifests import Manifest, manifests
from paceline_kubernetes.options import KubernetesOptions


class Kubernetes(ClusterLauncher):
    """A launcher that submits jobs to a cluster's API server."""

    name = "kubernetes"
    rank_launchers = ("torchrun", "agent", "spawn")
    files: ClassVar[FileSharing] = "image"
    extra = "kubernetes"

    def render(self, spec: LaunchSpec, options: KubernetesOptions | None = None) -> RenderedJob:
        """Render the manifests as one file, which ``kubectl apply -f`` accepts too."""
        options = options or KubernetesOptions()
        objects = tuple(manifests(spec, options))
        text = "---\n".join(map(to_yaml, objects))
        return RenderedJob(spec=spec, options=options, files={"job.yaml": text}, request=objects)

    def submit(self, rendered: RenderedJob) -> JobHandle:
        """Create the objects; the job owns the other objects, which are deleted with it."""
        options: KubernetesOptions = rendered.options
        cluster = KubernetesCluster(options.namespace, options.context)
        requested: list[Manifest] = []
        created: list[Manifest] = []
        try:
            for manifest in rendered.request:
                requested.append(manifest)
                with interrupt_at_exit():
                    created.append(_create(cluster, manifest))
            *others, job = created
            for other in others:
                owner = {"apiVersion": job["apiVersion"], "kind": job["kind"]}
                owner |= {key: job["metadata"][key] for key in ("name", "uid")}
                change = {"metadata": {"ownerReferences": [owner]}}
                cluster.patch(other["kind"], other["metadata"]["name"], change)
        except (LaunchError, KeyboardInterrupt) as error:
            was_refused = isinstance(error, KubernetesApiError) and not error.lost
            uncertain = [] if was_refused else requested[len(created) :]
            _delete(cluster, [*uncertain, *reversed(created)], error)
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
        return KubernetesJob(reference)


def _create(cluster: KubernetesCluster, manifest: Manifest) -> Manifest:
    """Create an object and return the server's copy, even if the answer was lost."""
    try:
        return cluster.create(manifest)
    except KubernetesApiError as error:
        existing = None
        if error.lost:
            with suppress(KubernetesApiError):
                existing = cluster.get(manifest["kind"], manifest["metadata"]["name"])
        if existing is None:
            raise
        return existing


def _delete(cluster: KubernetesCluster, objects: Sequence[Manifest], error: BaseException) -> None:
    """Delete the objects of a job that could not be submitted."""
    remaining = []
    for manifest in objects:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        try:
            cluster.delete(kind, name)
        except LaunchError:
            remaining.append(f"{kind.lower()}/{name}")
    if remaining:
        context = f" --context {cluster.context}" if cluster.context else ""
        raise LaunchError(
            f"{str(error) or 'interrupted.'} The job may exist and could not be deleted. Delete it with: "
            f"kubectl delete --ignore-not-found --namespace {cluster.namespace}{context} {' '.join(remaining)}"
        ) from error
