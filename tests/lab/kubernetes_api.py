"""A small Kubernetes API server: it keeps objects, and refuses what the published models do not know.

It knows the paths and verbs that a job needs. What a cluster's controllers would do, such as making
pods and setting conditions, the tests do: :meth:`ApiServer.set_pod`, :meth:`ApiServer.set_condition`. What is
owned goes with its owner.
"""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import kubeflow_trainer_api.models as kubeflow
import yaml
from kubernetes import client
from pydantic import ValidationError

TOKEN = "a-token-of-the-test"
NAMESPACE = "team"

Object = dict[str, Any]

_KINDS = {
    "services": ("Service", client.V1Service),
    "jobs": ("Job", kubeflow.IoK8sApiBatchV1Job),
    "jobsets": ("JobSet", kubeflow.JobsetV1alpha2JobSet),
    "trainjobs": ("TrainJob", kubeflow.TrainerV1alpha1TrainJob),
    "trainingruntimes": ("TrainingRuntime", kubeflow.TrainerV1alpha1TrainingRuntime),
    "monarchmeshes": ("MonarchMesh", None),  # which no package has a model of
}
_GROUPS = {
    "services": "/api/v1",
    "pods": "/api/v1",
    "jobs": "/apis/batch/v1",
    "jobsets": "/apis/jobset.x-k8s.io/v1alpha2",
    "trainjobs": "/apis/trainer.kubeflow.org/v1alpha1",
    "trainingruntimes": "/apis/trainer.kubeflow.org/v1alpha1",
    "monarchmeshes": "/apis/monarch.pytorch.org/v1alpha1",
}
_PATH = re.compile(r"(?P<group>/apis?/.+)/namespaces/(?P<ns>[^/]+)/(?P<plural>[a-z]+)(/(?P<name>[^/]+))?(?P<log>/log)?")
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


class RefusedError(Exception):
    """What the server answers instead of doing what was asked."""

    def __init__(self, status: int, message: str, name: str = "") -> None:
        super().__init__(message)
        self.status, self.name = status, name


class ApiServer:
    """A server on loopback, or on another address of the network in which it is made.

    Attributes:
        objects: what is kept, by plural and name.
        forbidden: verbs and plurals that the token may not use: ``("create", "jobs")``.
        without: plurals that the cluster does not know: its controllers are not installed.
        elastic: whether a JobSet's size may change, which older ones refuse.
        silent: plurals that are made, but the connection breaks before the answer.
        interrupting: plurals whose making is when the one who asks for it presses Ctrl-C.
        requests: every request, as ``(method, path)``.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.forbidden: set[tuple[str, str]] = set()
        self.without: set[str] = set()
        self.elastic = True
        self.silent: set[str] = set()
        self.interrupting: set[str] = set()
        self.requests: list[tuple[str, str]] = []
        self.changed = threading.Condition()
        self._logs: dict[str, tuple[list[str], bool]] = {}
        self._server = ThreadingHTTPServer((address, 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def kubeconfig(self, path: Path, *, token: str = TOKEN) -> Path:
        """Write the file that says how to reach the server."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "lab",
            "clusters": [{"name": "lab", "cluster": {"server": self.url}}],
            "users": [{"name": "tester", "user": {"token": token}}],
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "tester"}}],
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def end(self) -> None:
        with self.changed:
            self._logs = {pod: (lines, True) for pod, (lines, _) in self._logs.items()}
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def the(self, plural: str) -> Object:
        """The only object of that kind."""
        [found] = [kept for (kind, _), kept in self.objects.items() if kind == plural]
        return found

    def set_status(self, plural: str, **status: Any) -> None:
        self.the(plural)["status"] = status

    def set_condition(self, plural: str, kind: str, **words: str) -> None:
        """The condition that a controller sets at a job's end."""
        self.set_status(plural, conditions=[{"type": kind, "status": "True", **words}])

    def set_pod(
        self,
        name: str,
        labels: Mapping[str, str],
        *,
        index: int = 0,
        phase: str = "Running",
        spec: Object | None = None,
        **status: Any,
    ) -> None:
        metadata = {
            "name": name,
            "labels": dict(labels),
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
        }
        self.objects["pods", name] = {"metadata": metadata, "spec": spec or {}, "status": {"phase": phase, **status}}

    def write_log(self, pod: str, lines: Sequence[str], *, ended: bool = False) -> None:
        """What a pod prints; readers that follow it are given it at once."""
        with self.changed:
            before, _ = self._logs.get(pod, ([], False))
            self._logs[pod] = ([*before, *lines], ended)
            self.changed.notify_all()

    # What requests do.

    def create(self, plural: str, sent: Object) -> Object:
        kind, _ = _KINDS[plural]
        name = sent["metadata"]["name"]
        if sent["kind"] != kind or _GROUPS[plural].rpartition("/")[2] != sent["apiVersion"].rpartition("/")[2]:
            raise RefusedError(400, f"{sent['apiVersion']} {sent['kind']} does not belong here")
        if not _NAME.fullmatch(name):
            raise RefusedError(422, f'{kind} "{name}" is invalid: metadata.name')
        if (plural, name) in self.objects:
            raise RefusedError(409, f'{plural} "{name}" already exists', name)
        check(sent)
        if plural == "trainjobs" and sent["spec"]["runtimeRef"].get("kind") == "TrainingRuntime":
            runtime = sent["spec"]["runtimeRef"]["name"]
            if ("trainingruntimes", runtime) not in self.objects:
                raise RefusedError(403, "specified trainingRuntime must be created before the TrainJob is created")
        kept = {**sent, "metadata": {**sent["metadata"], "uid": str(uuid4())}, "status": {}}
        self.objects[plural, name] = kept
        return kept

    def patch(self, plural: str, name: str, change: Any) -> Object:
        kept = self._kept(plural, name)
        if plural == "jobsets" and not self.elastic:
            raise RefusedError(422, f'JobSet "{name}" is invalid: spec.replicatedJobs: field is immutable')
        _merge(kept, change)
        check({key: value for key, value in kept.items() if key != "status"})
        return kept

    def delete(self, plural: str, name: str) -> Object:
        gone = self._kept(plural, name)
        del self.objects[plural, name]
        for (other, owned), kept in list(self.objects.items()):
            owners = kept["metadata"].get("ownerReferences", [])
            if any(owner["uid"] == gone["metadata"].get("uid") for owner in owners):
                self.delete(other, owned)
        return {"kind": "Status", "status": "Success"}

    def get(self, plural: str, name: str | None, selector: str) -> Object:
        if name is not None:
            return self._kept(plural, name)
        wanted = dict(part.split("=") for part in selector.split(","))
        items = [
            kept
            for (kind, _), kept in self.objects.items()
            if kind == plural and wanted.items() <= kept["metadata"]["labels"].items()
        ]
        return {"kind": "List", "items": items}

    def log(self, pod: str, follow: bool) -> Iterator[str]:
        self._kept("pods", pod)
        if pod not in self._logs:
            raise RefusedError(400, f'container "node" in pod "{pod}" is waiting to start: ContainerCreating')
        printed = 0
        while True:
            with self.changed:
                lines, ended = self._logs[pod]
                if follow and not ended and len(lines) == printed:
                    self.changed.wait(1)
                    continue
            yield from lines[printed:]
            printed = len(lines)
            if ended or not follow:
                return

    def _kept(self, plural: str, name: str) -> Object:
        if (plural, name) not in self.objects:
            raise RefusedError(404, f'{plural} "{name}" not found', name)
        return self.objects[plural, name]


def _main_thread() -> int:
    """Where Python handles signals."""
    number = threading.main_thread().ident
    assert number is not None
    return number


def _handler(server: ApiServer) -> type[BaseHTTPRequestHandler]:
    verbs = {"POST": "create", "GET": "get", "PATCH": "patch", "DELETE": "delete"}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            url = urlsplit(self.path)
            server.requests.append((self.command, url.path))
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                self._act(url.path, parse_qs(url.query), json.loads(body or b"null"))
            except RefusedError as error:
                details = {"name": error.name} if error.name else {}
                status = {"kind": "Status", "status": "Failure", "message": str(error), "details": details}
                self._send(error.status, status)

        def _act(self, path: str, query: dict[str, list[str]], body: Any) -> None:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise RefusedError(401, "Unauthorized")
            match = _PATH.fullmatch(path)
            plural = match["plural"] if match else ""
            if match is None or _GROUPS.get(plural) != match["group"] or plural in server.without:
                raise RefusedError(404, "the server could not find the requested resource")
            verb, name = verbs[self.command], match["name"]
            if match["ns"] != NAMESPACE or (verb, plural) in server.forbidden:
                raise RefusedError(
                    403,
                    f'{plural} is forbidden: User "tester" cannot {verb} resource "{plural}" in API group '
                    f'"{match["group"]}" in the namespace "{match["ns"]}"',
                )
            if match["log"]:
                self._stream(server.log(name, query.get("follow") in (["true"], ["True"])))
            elif verb == "create":
                assert query.get("fieldValidation") == ["Strict"] or plural == "monarchmeshes"  # not Paceline's
                if plural in server.interrupting:
                    signal.pthread_kill(_main_thread(), signal.SIGINT)
                made = server.create(plural, body)
                if plural in server.silent:
                    self.close_connection = True
                else:
                    self._send(201, made)
            elif verb == "patch":
                kind = "strategic-merge-patch" if plural == "services" else "merge-patch"
                assert self.headers["Content-Type"] == f"application/{kind}+json"
                self._send(200, server.patch(plural, name, body))
            elif verb == "delete":
                assert query.get("propagationPolicy") == ["Background"] or plural == "monarchmeshes"
                self._send(200, server.delete(plural, name))
            else:
                self._send(200, server.get(plural, name, query.get("labelSelector", [""])[0]))

        def _send(self, status: int, answer: Object) -> None:
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _stream(self, lines: Iterator[str]) -> None:
            first = next(lines, None)  # a refusal comes before the headers
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Connection", "close")
            self.end_headers()
            for line in (first, *()) if first is None else (first, *lines):
                if line is not None:
                    self.wfile.write(line.encode() + b"\n")
                    self.wfile.flush()
            self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

        do_GET = do_POST = do_PATCH = do_DELETE = answer

    return Handler


def check(sent: Object) -> None:
    """Refuse what the published model does not know, or what has another type there."""
    model = next(model for kind, model in _KINDS.values() if kind == sent["kind"])
    if model is None:
        return
    try:
        known = _service(sent) if model is client.V1Service else model.from_dict(sent).to_dict()
    except (ValidationError, ValueError, TypeError) as error:
        raise RefusedError(422, f"{sent['kind']} is invalid: {error}") from error
    unknown = list(unknown_fields(sent, known))
    if unknown:
        raise RefusedError(400, f"strict decoding error: unknown field {', '.join(unknown)}")


def _service(sent: Object) -> Object:
    known: Object = client.ApiClient().sanitize_for_serialization(client.V1Service.from_dict(sent))
    return known


def unknown_fields(sent: Any, known: Any, at: str = "") -> Iterator[str]:
    """Where something that was sent is not in what the model makes of it."""
    if isinstance(sent, Mapping):
        for key, value in sent.items():
            if key not in known:
                yield f"{at}.{key}"
            else:
                yield from unknown_fields(value, known[key], f"{at}.{key}")
    elif isinstance(sent, list):
        for number, (value, other) in enumerate(zip(sent, known, strict=True)):
            yield from unknown_fields(value, other, f"{at}[{number}]")
    elif sent != known:
        yield f"{at} = {sent!r}"


def _merge(kept: Object, change: Object) -> None:
    """RFC 7386."""
    for key, value in change.items():
        if isinstance(value, dict):
            _merge(kept.setdefault(key, {}), value)
        elif value is None:
            kept.pop(key, None)
        else:
            kept[key] = value
