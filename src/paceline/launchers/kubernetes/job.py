"""A job on Kubernetes, followed through the API server."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.errors import ConfigError, LaunchError
from paceline.launchers.base import JobHandle, JobStatus
from paceline.launchers.kubernetes.api import Cluster, Refused, pod_index
from paceline.launchers.kubernetes.manifests import CONTAINER, Manifest
from paceline.launchers.watch import Watch

_POLL_S = 1.0
_ENDED = {"Complete": "succeeded", "Completed": "succeeded", "Failed": "failed"}


class KubernetesJob(JobHandle):
    """A Job, JobSet or TrainJob.

    Args:
        reference: its name as ``id``, ``kind``, ``namespace``, ``context``, ``server``, and ``nodes``: the
            least and the greatest number of machines.
        cluster: where it is; default: connected to when it is first asked.
    """

    def __init__(self, reference: Mapping[str, Any], cluster: Cluster | None = None) -> None:
        self._reference = dict(reference)
        self._name: str = reference["id"]
        self._kind: str = reference["kind"]
        self._connected = cluster

    @property
    def reference(self) -> dict[str, Any]:
        """As it is recorded."""
        return self._reference

    @property
    def _cluster(self) -> Cluster:
        if self._connected is None:
            self._connected = Cluster(self._reference["namespace"], self._reference["context"])
        return self._connected

    def status(self) -> JobStatus:
        """What the job's conditions say, and while it has none, its pods."""
        job = self._cluster.get(self._kind, self._name)
        if job is None:
            if self._elsewhere:
                return JobStatus(state="unknown", detail=self._elsewhere)
            return JobStatus(
                state="cancelled", detail=f"the cluster has no {self._kind} {self._name} any more"
            )
        pods = self._pods()
        failed = sum(pod["status"].get("phase") == "Failed" for pod in pods)
        for condition in job.get("status", {}).get("conditions", []):
            state = _ENDED.get(condition["type"])
            if state is not None and condition["status"] == "True":
                if state == "succeeded":
                    return JobStatus(state="succeeded", exit_code=0, restarts=failed)
                detail = ": ".join(condition[key] for key in ("reason", "message") if condition.get(key))
                return JobStatus(
                    state="failed", detail=detail, exit_code=_exit_code(pods), restarts=max(0, failed - 1)
                )
        if any(pod["status"].get("phase") == "Running" for pod in pods):
            running = sum(pod["status"].get("phase") == "Running" for pod in pods)
            return JobStatus(state="running", detail=f"{running} pod(s)", restarts=failed)
        return JobStatus(state="pending", detail=_what_it_waits_for(pods), restarts=failed)

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """What the pods print; with several, each line begins with the machine's number."""
        if follow:
            yield from self._followed()
            return
        pods = self._pods()
        several = len({pod_index(pod) for pod in pods}) > 1
        for pod in pods:
            prefix = f"node-{pod_index(pod)} | " if several else ""
            for line in self._cluster.log(pod["metadata"]["name"], follow=False):
                yield prefix + line

    def cancel(self) -> None:
        """Delete the job; what it owns goes with it, its pods after their time to save.

        Raises:
            LaunchError: the API server refused it, or is not the one that has the job.
        """
        if self._elsewhere and self._cluster.get(self._kind, self._name) is None:
            raise LaunchError(f"{self._elsewhere}. Set KUBECONFIG to the file that describes its cluster.")
        self._cluster.delete(self._kind, self._name)

    def wait(self) -> int:
        """Ask until it has ended."""
        status = self._watch().wait()
        if status.state != "succeeded":
            print(f"paceline: {self._kind} {self._name} {status.state}: {status.detail}.", file=sys.stderr)
        return 1 if status.exit_code is None else status.exit_code

    def scale(self, nodes: int) -> None:
        """Give the job so many pods: those with the highest indices go, or new ones come.

        An indexed Job takes its new size while it runs (Kubernetes 1.27). A JobSet does from its version 0.12
        on, where ElasticJobSet is switched on; before, its Job is changed beneath it, which it lets be. So it
        is with the JobSet of a TrainJob, whose own ``numNodes`` is fixed.
        """
        least, most = self._reference["nodes"]
        if not least <= nodes <= most:
            raise ConfigError(
                f"--nodes {nodes}: this job was submitted with --nodes "
                f"{least if least == most else f'{least}:{most}'}, and can only have so many machines."
            )
        size = {"completions": nodes, "parallelism": nodes}
        if self._kind == "Job":
            self._cluster.patch("Job", self._name, {"spec": size})
            return
        job_set = self._cluster.get("JobSet", self._name)
        if job_set is None:
            raise LaunchError(f"the cluster has no JobSet {self._name}, or not yet: see paceline status.")
        replicated = job_set["spec"]["replicatedJobs"]
        replicated[0]["template"]["spec"].update(size)
        try:
            self._cluster.patch("JobSet", self._name, {"spec": {"replicatedJobs": replicated}})
        except Refused as error:
            if error.status not in (400, 403, 422):
                raise
            self._cluster.patch("Job", f"{self._name}-{CONTAINER}-0", {"spec": size})

    @property
    def _elsewhere(self) -> str:
        """Why a job that is not found may be in another cluster; "" where it cannot.

        A kubeconfig may have changed since, and two may have a context of the same name.
        """
        asked, server = self._cluster.server, self._reference.get("server")
        if server == asked:
            return ""
        missing = f"{asked} has no {self._kind} {self._name}"
        return f"it was submitted to {server}, and {missing}" if server else f"{missing}, but another may"

    def _pods(self) -> list[Manifest]:
        label = "batch.kubernetes.io/job-name" if self._kind == "Job" else "jobset.sigs.k8s.io/jobset-name"
        return self._cluster.pods(f"{label}={self._name}")

    def _watch(self) -> Watch:
        return Watch(self.status, (_POLL_S, _POLL_S))

    def _followed(self) -> Iterator[str]:
        """The lines of all pods as they come, also of those that come later, until the job has ended."""
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        readers: dict[str, threading.Thread] = {}
        _, most = self._reference["nodes"]
        watch = self._watch()
        while True:
            ended = watch.ended()
            pods = watch.answer(self._pods)
            ended = ended and pods is not None
            for pod in pods or ():
                name = pod["metadata"]["name"]
                if name not in readers and pod["status"].get("phase") != "Pending":
                    prefix = f"node-{pod_index(pod)} | " if most > 1 else ""
                    readers[name] = threading.Thread(
                        target=self._read, args=(name, prefix, lines), daemon=True, name=f"log of {name}"
                    )
                    readers[name].start()
            if ended:
                for reader in readers.values():
                    reader.join(timeout=_POLL_S)
            yield from _drained(lines, 0.0 if ended else _POLL_S)
            if ended:
                return

    def _read(self, pod: str, prefix: str, lines: queue.SimpleQueue[str]) -> None:
        try:
            for line in self._cluster.log(pod, follow=True):
                lines.put(prefix + line)
        except Refused as error:
            lines.put(f"{prefix}paceline: {error}")


def _drained(lines: queue.SimpleQueue[str], wait_s: float) -> Iterator[str]:
    """What comes within so many seconds, and all that is there then."""
    until = time.monotonic() + wait_s
    while True:
        try:
            yield lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return


def _container(pod: Manifest) -> Manifest:
    """The state of a pod's container: ``waiting``, ``running`` or ``terminated``."""
    for status in pod["status"].get("containerStatuses", []):
        if status["name"] == CONTAINER:
            state: Manifest = status.get("state", {})
            return state
    return {}


def _exit_code(pods: list[Manifest]) -> int | None:
    """The exit code of the container that failed first."""
    ends = [_container(pod).get("terminated", {}) for pod in pods]
    failed = [end for end in ends if end.get("exitCode")]
    return min(failed, key=lambda end: end.get("finishedAt", ""))["exitCode"] if failed else None


def _what_it_waits_for(pods: list[Manifest]) -> str:
    """Why no pod runs, in the cluster's words."""
    for pod in pods:
        waiting = _container(pod).get("waiting", {})
        if waiting.get("reason"):
            return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
        for condition in pod["status"].get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
    return "" if pods else "no pods yet"
