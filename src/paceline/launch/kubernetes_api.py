"""What Paceline asks of a Kubernetes API server."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, LaunchError
from paceline.launch.job_logs import StatusPoller
from paceline.launch.kubernetes_manifests import CONTAINER, Manifest
from paceline.launch.launcher import JobHandle, JobStatus

# --- The Kubernetes API server: make, look at, change and delete objects; read what pods print ---


_PLURALS = {
    "Service": ("", "v1", "services"),
    "Job": ("batch", "v1", "jobs"),
    "JobSet": ("jobset.x-k8s.io", "v1alpha2", "jobsets"),
    "TrainJob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs"),
    "TrainingRuntime": ("trainer.kubeflow.org", "v1alpha1", "trainingruntimes"),
}
_TRAINER = "Install Kubeflow Trainer there (https://www.kubeflow.org), or use --kind jobset or job."
_INSTALL = {
    "JobSet": "Install JobSet there (https://jobset.sigs.k8s.io), or use --kind job.",
    "TrainJob": _TRAINER,
    "TrainingRuntime": _TRAINER,
}
_TIMEOUT_S = (5, 30)  # to connect, to answer
_SILENCE_S = (5, 7 * 86400)  # of a log that is followed


class KubernetesApiError(LaunchError):
    """The API server did not do what was asked.

    Attributes:
        status: the HTTP status; 0 where nobody answered.
        lost: whether it may have been done nevertheless: the request was sent, and nobody said what became
            of it.
    """

    def __init__(self, message: str, status: int, *, lost: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.lost = lost or status >= 500


class KubernetesCluster:
    """One namespace of a cluster, as a kubeconfig or the pod that this runs in describes it.

    Args:
        namespace: where the objects are.
        context: the kubeconfig's; default: its current one.

    Attributes:
        context: the kubeconfig's; None in a pod.
        server: the API server's address.

    Raises:
        LaunchError: the kubernetes library is not installed, or nothing describes a cluster.
    """

    def __init__(self, namespace: str, context: str | None) -> None:
        try:
            import kubernetes
        except ImportError as error:
            raise LaunchError(
                "--on kubernetes submits and follows jobs with the kubernetes library. Install it: "
                "pip install 'paceline[kubernetes]'. --dry-run works without."
            ) from error
        configuration = kubernetes.client.Configuration()
        file = os.environ.get("KUBECONFIG")
        self.context = None
        try:
            if _in_a_pod():
                kubernetes.config.load_incluster_config(client_configuration=configuration)
            else:
                kubernetes.config.load_kube_config(
                    config_file=file, context=context, client_configuration=configuration
                )
                self.context = context or kubernetes.config.list_kube_config_contexts(file)[1]["name"]
        except (kubernetes.config.ConfigException, OSError) as error:
            asked = f" (--context {context})" if context else ""
            said = str(error).rstrip(".")
            raise LaunchError(
                f"nothing says how to reach a Kubernetes cluster{asked}: {said}. Set KUBECONFIG; `kubectl "
                "config get-contexts` lists what there is."
            ) from error
        configuration.retries = 1
        client = kubernetes.client.ApiClient(configuration)
        self.namespace = namespace
        self.server = str(configuration.host)
        self._objects = kubernetes.client.CustomObjectsApi(client)
        self._core = kubernetes.client.CoreV1Api(client)

    def create(self, manifest: Manifest) -> Manifest:
        """Make an object; return it as the server keeps it.

        Raises:
            Refused: with the server's own words.
        """
        name = str(manifest["metadata"]["name"])
        return self._call("create", manifest["kind"], name, body=manifest, field_validation="Strict")

    def get(self, kind: str, name: str) -> Manifest | None:
        """An object as it is now; None where there is none.

        Raises:
            Refused: with the server's own words.
        """
        try:
            return self._call("get", kind, name)
        except KubernetesApiError as error:
            if error.status == 404:
                return None
            raise

    def patch(self, kind: str, name: str, change: Manifest) -> None:
        """Change an object by a merge patch (RFC 7386).

        Raises:
            Refused: with the server's own words.
        """
        self._call("patch", kind, name, body=change)

    def delete(self, kind: str, name: str) -> None:
        """Delete an object and what it owns; nothing happens where there is none.

        Raises:
            Refused: with the server's own words.
        """
        try:
            self._call("delete", kind, name, propagation_policy="Background")
        except KubernetesApiError as error:
            if error.status != 404:
                raise

    def pods(self, selector: str) -> list[Manifest]:
        """The pods with these labels, in the order of their indices.

        Raises:
            Refused: with the server's own words.
        """
        listed = self._answer(
            "list pods",
            lambda: self._core.list_namespaced_pod(
                self.namespace, label_selector=selector, _preload_content=False, _request_timeout=_TIMEOUT_S
            ),
        )
        return sorted(listed["items"], key=pod_index)

    def log(self, pod: str, *, follow: bool) -> Iterator[str]:
        """What a pod prints, line by line; with ``follow`` until it ends. Nothing where it has not started.

        Raises:
            Refused: with the server's own words.
        """
        from urllib3.exceptions import HTTPError

        try:
            response = self._called(
                f"read the log of pod {pod}",
                lambda: self._core.read_namespaced_pod_log(
                    pod,
                    self.namespace,
                    container=CONTAINER,
                    follow=follow,
                    _preload_content=False,
                    _request_timeout=_SILENCE_S if follow else _TIMEOUT_S,
                ),
            )
        except KubernetesApiError as error:
            if error.status in (400, 404):  # its container waits to be created, or it is gone
                return
            raise
        rest = b""
        try:
            for block in response.stream(1024, decode_content=True):
                *lines, rest = (rest + block).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
        except HTTPError as error:
            raise KubernetesApiError(f"the log of pod {pod} ends here: {error}.", 0) from error
        if rest:
            yield rest.decode(errors="replace")

    def _call(self, verb: str, kind: str, name: str, **arguments: Any) -> Manifest:
        group, version, plural = _PLURALS[kind]
        if group:
            method = getattr(self._objects, f"{verb}_namespaced_custom_object")
            arguments |= {"group": group, "version": version, "plural": plural}
        else:
            method = getattr(self._core, f"{'read' if verb == 'get' else verb}_namespaced_service")
        if verb != "create":
            arguments["name"] = name
        what = f"{verb} {kind} {name} in namespace {self.namespace}"
        return self._answer(
            what,
            lambda: method(namespace=self.namespace, _preload_content=False, _request_timeout=_TIMEOUT_S, **arguments),
            kind,
        )

    def _answer(self, what: str, call: Any, kind: str = "") -> Manifest:
        def read() -> Any:
            response = call()
            response.read(cache_content=True)  # here it is noticed where an answer breaks off
            return response

        answer: Manifest = json.loads(self._called(what, read, kind).data)
        return answer

    def _called(self, what: str, call: Any, kind: str = "") -> Any:
        """The response to a request, whose words are passed on where it is a refusal."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError, MaxRetryError

        try:
            response = call()
        except HTTPError as error:
            reason = getattr(error, "reason", None) or error
            raise KubernetesApiError(
                f"the Kubernetes API server {self.server} cannot be reached: {reason}. Check it with "
                "`kubectl cluster-info`; --context chooses another cluster.",
                0,
                lost=not isinstance(error, MaxRetryError),  # only what was never sent is tried again
            ) from error
        except ApiException as error:
            raise self._refusal(what, kind, error.status or 0, error.body or error.reason or "") from error
        if response.status >= 400:
            raise self._refusal(what, kind, response.status, response.data)
        return response

    def _refusal(self, what: str, kind: str, status: int, body: str | bytes) -> KubernetesApiError:
        """A refusal in the server's words, and what to do."""
        words = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
        details: Any = {}
        with suppress(ValueError):
            answer = json.loads(words)
            words, details = str(answer.get("message", words)), answer.get("details") or {}
        missing_kind = status == 404 and kind in _INSTALL and not details.get("name")
        advice = {
            401: "Log in to the cluster again, or choose another --context.",
            403: "Ask for the right to do so, or choose another --namespace or --context.",
            404: _INSTALL[kind] if missing_kind else "Check --namespace.",
            409: "Give another --name.",
            422: "The manifest is what --dry-run shows.",
        }.get(status, "")
        return KubernetesApiError(
            f"the Kubernetes API server refused to {what}: {words.strip().rstrip('.')}. {advice}".rstrip(),
            status,
        )


def pod_index(pod: Manifest) -> int:
    """A pod's number in its job."""
    return int(pod["metadata"].get("annotations", {}).get("batch.kubernetes.io/job-completion-index", 0))


def _in_a_pod() -> bool:
    """Whether this runs in a pod, and no kubeconfig says otherwise."""
    configured = os.environ.get("KUBECONFIG") or (Path.home() / ".kube" / "config").exists()
    return "KUBERNETES_SERVICE_HOST" in os.environ and not configured


# --- A job on Kubernetes, followed through the API server ---


_POLL_S = 1.0
_ENDED = {"Complete": "succeeded", "Completed": "succeeded", "Failed": "failed"}


class KubernetesJob(JobHandle):
    """A Job, JobSet or TrainJob.

    Args:
        reference: its name as ``id``, ``kind``, ``namespace``, ``context``, ``server``, and ``nodes``: the
            least and the greatest number of machines.
        cluster: where it is; default: connected to when it is first asked.
    """

    def __init__(self, reference: Mapping[str, Any], cluster: KubernetesCluster | None = None) -> None:
        self._reference = dict(reference)
        self._name: str = reference["id"]
        self._kind: str = reference["kind"]
        self._connected = cluster

    @property
    def reference(self) -> dict[str, Any]:
        """As it is recorded."""
        return self._reference

    @property
    def _cluster(self) -> KubernetesCluster:
        if self._connected is None:
            self._connected = KubernetesCluster(self._reference["namespace"], self._reference["context"])
        return self._connected

    def status(self) -> JobStatus:
        """What the job's conditions say, and while it has none, its pods."""
        job = self._cluster.get(self._kind, self._name)
        if job is None:
            if self._elsewhere:
                return JobStatus(state="unknown", detail=self._elsewhere)
            return JobStatus(state="cancelled", detail=f"the cluster has no {self._kind} {self._name} any more")
        pods = self._pods()
        failed = sum(pod["status"].get("phase") == "Failed" for pod in pods)
        for condition in job.get("status", {}).get("conditions", []):
            state = _ENDED.get(condition["type"])
            if state is not None and condition["status"] == "True":
                if state == "succeeded":
                    return JobStatus(state="succeeded", exit_code=0, restarts=failed)
                detail = ": ".join(condition[key] for key in ("reason", "message") if condition.get(key))
                return JobStatus(state="failed", detail=detail, exit_code=_exit_code(pods), restarts=max(0, failed - 1))
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
        except KubernetesApiError as error:
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

    def _watch(self) -> StatusPoller:
        return StatusPoller(self.status, (_POLL_S, _POLL_S))

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
        except KubernetesApiError as error:
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
