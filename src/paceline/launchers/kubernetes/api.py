"""The Kubernetes API server: make, look at, change and delete objects; read what pods print."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError
from paceline.launchers.kubernetes.manifests import CONTAINER, Manifest

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


class Refused(LaunchError):
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


class Cluster:
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
        except Refused as error:
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
        except Refused as error:
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
        except Refused as error:
            if error.status in (400, 404):  # its container waits to be created, or it is gone
                return
            raise
        rest = b""
        try:
            for block in response.stream(1024, decode_content=True):
                *lines, rest = (rest + block).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
        except HTTPError as error:
            raise Refused(f"the log of pod {pod} ends here: {error}.", 0) from error
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
            lambda: method(
                namespace=self.namespace, _preload_content=False, _request_timeout=_TIMEOUT_S, **arguments
            ),
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
            raise Refused(
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

    def _refusal(self, what: str, kind: str, status: int, body: str | bytes) -> Refused:
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
        return Refused(
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
