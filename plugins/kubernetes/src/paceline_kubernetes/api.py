"""Access to a Kubernetes API server, and jobs on it."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from paceline.core.errors import ConfigError, LaunchError
from paceline.core.files import home_directory
from paceline.core.plugins import install_command
from paceline.launch.launcher import JobStatus
from paceline.launch.status_poller import PolledJob
from paceline_kubernetes.manifests import CONTAINER, Manifest

# --- Requests: create, read, change and delete objects; read the output of pods ---


_PLURALS = {
    "Service": ("", "v1", "services"),
    "Job": ("batch", "v1", "jobs"),
    "JobSet": ("jobset.x-k8s.io", "v1alpha2", "jobsets"),
    "TrainJob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs"),
    "TrainingRuntime": ("trainer.kubeflow.org", "v1alpha1", "trainingruntimes"),
}
_TRAINER = "Install Kubeflow Trainer in the cluster (https://www.kubeflow.org), or use --kind jobset or job."
_INSTALL = {
    "JobSet": "Install JobSet in the cluster (https://jobset.sigs.k8s.io), or use --kind job.",
    "TrainJob": _TRAINER,
    "TrainingRuntime": _TRAINER,
}
_TIMEOUT_S = (5, 30)  # to connect, to answer
_SILENCE_S = (5, 7 * 86400)  # while a log is followed


class KubernetesApiError(LaunchError):
    """A request to the API server failed.

    Attributes:
        status: of HTTP; 0 without an answer.
        lost: whether the request may have been carried out, because it was sent but not answered.
    """

    def __init__(self, message: str, status: int, *, lost: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.lost = lost or status >= 500


class _MissingError(KubernetesApiError):
    """The server has no such object, or does not know its kind."""


class KubernetesCluster:
    """One namespace of a cluster, described by a kubeconfig or by the pod of this process.

    Args:
        context: of the kubeconfig; default: its current one.

    Attributes:
        context: of the kubeconfig; None in a pod.

    Raises:
        LaunchError: the kubernetes library is not installed, or no cluster is configured.
        KubernetesApiError: (from the methods) with the server's message.
    """

    def __init__(self, namespace: str, context: str | None) -> None:
        try:
            import kubernetes
        except ImportError as error:
            raise LaunchError(
                "--on kubernetes submits and follows jobs with the kubernetes library. Install it: "
                f"{install_command('kubernetes')}. --dry-run works without."
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
            context_text = f" (--context {context})" if context else ""
            message = str(error).rstrip(".")
            raise LaunchError(
                f"no Kubernetes cluster is configured{context_text}: {message}. Set KUBECONFIG; `kubectl config "
                "get-contexts` lists the available contexts."
            ) from error
        configuration.retries = 1
        client = kubernetes.client.ApiClient(configuration)
        self.namespace = namespace
        self.server = str(configuration.host)
        self._objects = kubernetes.client.CustomObjectsApi(client)
        self._core = kubernetes.client.CoreV1Api(client)

    def create(self, manifest: Manifest) -> Manifest:
        """Create an object and return the server's copy."""
        name = str(manifest["metadata"]["name"])
        return self._call("create", manifest["kind"], name, body=manifest, field_validation="Strict")

    def get(self, kind: str, name: str) -> Manifest | None:
        """Return an object, or None if it does not exist."""
        with suppress(_MissingError):
            return self._call("get", kind, name)
        return None

    def patch(self, kind: str, name: str, change: Manifest) -> None:
        """Change an object with a merge patch (RFC 7386)."""
        self._call("patch", kind, name, body=change)

    def delete(self, kind: str, name: str) -> None:
        """Delete an object with everything that it owns, if it exists."""
        with suppress(_MissingError):
            self._call("delete", kind, name, propagation_policy="Background")

    def pods(self, selector: str) -> list[Manifest]:
        """Return the pods with these labels, ordered by index."""
        pod_list = self._answer("list pods", self._core.list_namespaced_pod, label_selector=selector)
        return sorted(pod_list["items"], key=pod_index)

    def log(self, pod: str, *, follow: bool) -> Iterator[str]:
        """Yield a pod's output by lines, until it ends with ``follow``; nothing if it has not started."""
        from urllib3.exceptions import HTTPError

        try:
            what, method = f"read the log of pod {pod}", self._core.read_namespaced_pod_log
            limit_s = _SILENCE_S if follow else _TIMEOUT_S
            response = self._request(what, method, limit_s=limit_s, name=pod, container=CONTAINER, follow=follow)
        except KubernetesApiError as error:
            if error.status in (400, 404):  # the container was not created yet, or the pod is gone
                return
            raise
        rest = b""
        try:
            for block in response.stream(1024, decode_content=True):
                *lines, rest = (rest + block).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
        except HTTPError as error:
            raise KubernetesApiError(f"the log of pod {pod} broke off: {error}.", 0) from error
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
        return self._answer(f"{verb} {kind} {name} in namespace {self.namespace}", method, kind, **arguments)

    def _answer(self, what: str, method: Callable[..., Any], kind: str = "", **arguments: Any) -> Manifest:
        def whole(**options: Any) -> Any:
            response = method(**options)
            response.read(cache_content=True)  # raises if the answer breaks off
            return response

        answer: Manifest = json.loads(self._request(what, whole, kind, **arguments).data)
        return answer

    def _request(
        self,
        what: str,
        method: Callable[..., Any],
        kind: str = "",
        *,
        limit_s: tuple[float, float] = _TIMEOUT_S,
        **arguments: Any,
    ) -> Any:
        """Return the response to a request; raise the server's message if it is an error."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError, MaxRetryError

        try:
            response = method(namespace=self.namespace, _preload_content=False, _request_timeout=limit_s, **arguments)
        except HTTPError as error:
            reason = getattr(error, "reason", None) or error
            raise KubernetesApiError(
                f"the Kubernetes API server {self.server} cannot be reached: {reason}. Check it with "
                "`kubectl cluster-info`; --context chooses another cluster.",
                0,
                lost=not isinstance(error, MaxRetryError),  # urllib3 retries only requests that were never sent
            ) from error
        except ApiException as error:
            raise self._api_error(what, kind, error.status or 0, error.body or error.reason or "") from error
        if response.status >= 400:
            raise self._api_error(what, kind, response.status, response.data)
        return response

    def _api_error(self, what: str, kind: str, status: int, body: str | bytes) -> KubernetesApiError:
        """Return an error with the server's message and advice."""
        words = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
        details: Any = {}
        with suppress(ValueError):
            answer = json.loads(words)
            words, details = str(answer.get("message", words)), answer.get("details") or {}
        missing_kind = status == 404 and kind in _INSTALL and not details.get("name")
        advice = {
            401: "Log in to the cluster again, or choose another --context.",
            403: "Request the permission, or choose another --namespace or --context.",
            404: _INSTALL[kind] if missing_kind else "Check --namespace.",
            409: "Give another --name.",
            422: "See the manifest with --dry-run.",
        }.get(status, "")
        return (_MissingError if status == 404 else KubernetesApiError)(
            f"the Kubernetes API server refused to {what}: {words.strip().rstrip('.')}. {advice}".rstrip(),
            status,
        )


def pod_index(pod: Manifest) -> int:
    """Return a pod's index in its job."""
    return int(pod["metadata"].get("annotations", {}).get("batch.kubernetes.io/job-completion-index", 0))


def _in_a_pod() -> bool:
    """Return whether this process runs in a pod without a kubeconfig."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ or os.environ.get("KUBECONFIG"):
        return False
    home = home_directory()
    return home is None or not (home / ".kube" / "config").exists()


# --- A job, followed through the API server ---


_POLL_S = 1.0
_ENDED = {"Complete": "succeeded", "Completed": "succeeded", "Failed": "failed"}


class KubernetesJob(PolledJob):
    """A Job, JobSet or TrainJob.

    Args:
        reference: its name as ``id``, ``kind``, ``namespace``, ``context``, ``server``, and ``nodes``: the
            smallest and the largest number of nodes.
        cluster: of the job; default: connect on the first request.
    """

    intervals_s = (_POLL_S, _POLL_S)

    def __init__(self, reference: Mapping[str, Any], cluster: KubernetesCluster | None = None) -> None:
        super().__init__(reference)
        self._name: str = reference["id"]
        self._kind: str = reference["kind"]
        self.title = f"{self._kind} {self._name}"
        self._connected = cluster

    @property
    def _cluster(self) -> KubernetesCluster:
        if self._connected is None:
            self._connected = KubernetesCluster(self._reference["namespace"], self._reference["context"])
        return self._connected

    def status(self) -> JobStatus:
        """Return the state of the job's conditions, or of its pods while it has none."""
        job = self._cluster.get(self._kind, self._name)
        if job is None:
            if self._other_cluster:
                return JobStatus(state="unknown", detail=self._other_cluster)
            return JobStatus(state="cancelled", detail=f"{self._kind} {self._name} no longer exists in the cluster")
        pods = self._pods()
        failed = sum(pod["status"].get("phase") == "Failed" for pod in pods)
        for condition in job.get("status", {}).get("conditions", []):
            state = _ENDED.get(condition["type"])
            if state is not None and condition["status"] == "True":
                if state == "succeeded":
                    return JobStatus(state="succeeded", exit_code=0, restarts=failed)
                detail = ": ".join(condition[key] for key in ("reason", "message") if condition.get(key))
                return JobStatus(state="failed", detail=detail, exit_code=_exit_code(pods), restarts=max(0, failed - 1))
        if running := sum(pod["status"].get("phase") == "Running" for pod in pods):
            return JobStatus(state="running", detail=f"{running} pod(s)", restarts=failed)
        return JobStatus(state="pending", detail=_pending_reason(pods), restarts=failed)

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """Yield the output of the pods, with the node's number before each line if there are several."""
        if follow:
            yield from self._follow()
            return
        pods = self._pods()
        has_several = len({pod_index(pod) for pod in pods}) > 1
        for pod in pods:
            prefix = f"node-{pod_index(pod)} | " if has_several else ""
            for line in self._cluster.log(pod["metadata"]["name"], follow=False):
                yield prefix + line

    def cancel(self) -> None:
        """Delete the job and everything that it owns; its pods first have time to save."""
        if self._other_cluster and self._cluster.get(self._kind, self._name) is None:
            raise LaunchError(f"{self._other_cluster}. Set KUBECONFIG to the file that describes its cluster.")
        self._cluster.delete(self._kind, self._name)

    def scale(self, nodes: int) -> None:
        """Change the number of pods: those with the highest indices are deleted, or new ones are created.

        An indexed Job can be resized while it runs (Kubernetes 1.27). A JobSet can since its version 0.12 with
        ElasticJobSet enabled; before, its Job is changed directly, which JobSet tolerates. The same applies to
        the JobSet of a TrainJob, whose own ``numNodes`` is fixed.
        """
        least, most = self._reference["nodes"]
        if not least <= nodes <= most:
            raise ConfigError(
                f"--nodes {nodes}: must be within the --nodes "
                f"{least if least == most else f'{least}:{most}'} with which this job was submitted."
            )
        size = {"completions": nodes, "parallelism": nodes}
        if self._kind == "Job":
            self._cluster.patch("Job", self._name, {"spec": size})
            return
        job_set = self._cluster.get("JobSet", self._name)
        if job_set is None:
            raise LaunchError(f"JobSet {self._name} does not exist, or not yet: see paceline status.")
        replicated = job_set["spec"]["replicatedJobs"]
        replicated[0]["template"]["spec"].update(size)
        try:
            self._cluster.patch("JobSet", self._name, {"spec": {"replicatedJobs": replicated}})
        except KubernetesApiError as error:
            if error.status not in (400, 403, 422):
                raise
            self._cluster.patch("Job", f"{self._name}-{CONTAINER}-0", {"spec": size})

    @property
    def _other_cluster(self) -> str:
        """Return why a job that is not found may be in another cluster; "" if it cannot be.

        The kubeconfig may have changed, and two may have a context of the same name.
        """
        current, server = self._cluster.server, self._reference.get("server")
        if server == current:
            return ""
        missing = f"{current} has no {self._kind} {self._name}"
        return f"it was submitted to {server}, and {missing}" if server else f"{missing}, but another may have it"

    def _pods(self) -> list[Manifest]:
        label = "batch.kubernetes.io/job-name" if self._kind == "Job" else "jobset.sigs.k8s.io/jobset-name"
        return self._cluster.pods(f"{label}={self._name}")

    def _follow(self) -> Iterator[str]:
        """Yield the lines of all pods, including later ones, until the job has ended."""
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        readers: dict[str, threading.Thread] = {}
        _, most = self._reference["nodes"]
        poller = self.poller()
        while True:
            ended = poller.ended()
            pods = poller.answer(self._pods)
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
            yield from _drain(lines, 0.0 if ended else _POLL_S)
            if ended:
                return

    def _read(self, pod: str, prefix: str, lines: queue.SimpleQueue[str]) -> None:
        try:
            for line in self._cluster.log(pod, follow=True):
                lines.put(prefix + line)
        except KubernetesApiError as error:
            lines.put(f"{prefix}paceline: {error}")


def _drain(lines: queue.SimpleQueue[str], wait_s: float) -> Iterator[str]:
    """Yield the lines that arrive within ``wait_s``, and all that have arrived by then."""
    until = time.monotonic() + wait_s
    while True:
        try:
            yield lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return


def _container(pod: Manifest) -> Manifest:
    """Return the state of a pod's container: ``waiting``, ``running`` or ``terminated``."""
    for status in pod["status"].get("containerStatuses", []):
        if status["name"] == CONTAINER:
            state: Manifest = status.get("state", {})
            return state
    return {}


def _exit_code(pods: list[Manifest]) -> int | None:
    """Return the exit code of the container that failed first."""
    ends = [_container(pod).get("terminated", {}) for pod in pods]
    failed = [end for end in ends if end.get("exitCode")]
    return min(failed, key=lambda end: end.get("finishedAt", ""))["exitCode"] if failed else None


def _pending_reason(pods: list[Manifest]) -> str:
    """Return why no pod runs, in the cluster's words."""
    for pod in pods:
        waiting = _container(pod).get("waiting", {})
        if waiting.get("reason"):
            return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
        for condition in pod["status"].get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
    return "" if pods else "no pods yet"
