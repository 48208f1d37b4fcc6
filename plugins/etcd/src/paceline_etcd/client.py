"""A client of etcd's JSON gateway that tries several members in turn, and a session with an etcd lease. No torch.

etcd 3.4 and later answer to JSON over HTTP at ``/v3/...``, so that no client library is needed: keys and values are in
base64, 64-bit numbers are strings (https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/). TLS and the user are given
as etcdctl takes them, by environment variables; no secret is an argument, or in a file or message of ours.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import queue
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

import msgspec

from paceline.core.environment import EtcdEndpoints
from paceline.core.errors import ConfigError, PacelineError

_INVALID_ARGUMENT, _NOT_FOUND, _PERMISSION_DENIED, _UNAUTHENTICATED = 3, 5, 7, 16  # gRPC's codes
_ROOT = "/paceline/"


class EtcdUnavailableError(PacelineError):
    """No member of the cluster has answered in time; a request may have been executed all the same."""


class _LeaseExpiredError(PacelineError):
    """The cluster no longer knows the etcd lease."""


# --- One request ---


@dataclass(frozen=True)
class EtcdCredentials:
    """How etcd knows this user, and this user knows etcd.

    Attributes:
        user: "" if etcd requires no user.
        cacert: a file with the certificates to trust; "" for the system's.
        cert: a file with the client's certificate; "" for none.
    """

    user: str = ""
    password: str = field(default="", repr=False)
    cacert: str = ""
    cert: str = ""
    key: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> EtcdCredentials:
        """Read etcdctl's variables: ETCDCTL_USER (``USER`` or ``USER:PASSWORD``), _PASSWORD, _CACERT, _CERT, _KEY."""
        user, _, password = environ.get("ETCDCTL_USER", "").partition(":")
        password = password or environ.get("ETCDCTL_PASSWORD", "")
        if user and not password:
            raise ConfigError("ETCDCTL_USER is set without a password. Set ETCDCTL_PASSWORD too.")
        files = {name: environ.get(f"ETCDCTL_{name.upper()}", "") for name in ("cacert", "cert", "key")}
        if bool(files["cert"]) != bool(files["key"]):
            raise ConfigError("ETCDCTL_CERT and ETCDCTL_KEY must both be set, or neither.")
        return cls(user, password, **files)

    def tls_context(self) -> ssl.SSLContext:
        """Return the context of encrypted connections."""
        try:
            context = ssl.create_default_context(cafile=self.cacert or None)
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
        except OSError as error:
            files = ", ".join(file for file in (self.cacert, self.cert, self.key) if file)
            raise ConfigError(f"the certificates for etcd ({files}) cannot be loaded: {error}.") from error
        return context


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Members do not redirect, and the authentication token is for them alone."""

    def redirect_request(self, *args: Any) -> None:
        return None


class EtcdClient:
    """Sends requests to the member that answered last, and to the others if it does not. Not thread-safe.

    Args:
        timeout_s: how long one member may take to accept a connection, and to answer.

    Raises:
        ConfigError: a certificate cannot be loaded.
    """

    def __init__(self, endpoints: EtcdEndpoints, credentials: EtcdCredentials, timeout_s: float) -> None:
        self._endpoints = endpoints
        self._credentials = credentials
        self._timeout_s = timeout_s
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirects()]
        if endpoints.tls:
            handlers.append(urllib.request.HTTPSHandler(context=credentials.tls_context()))
        self._opener = urllib.request.build_opener(*handlers)
        self._current = 0
        self._auth_token = ""

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of the first member that gives one.

        Raises:
            EtcdUnavailableError: none does.
            ConfigError: etcd rejects the user.
        """
        if self._credentials.user and not self._auth_token:
            self._authenticate()
        try:
            return self._call_any(path, body)
        except _UnauthenticatedError:  # the token was good for some minutes
            self._authenticate()
            return self._call_any(path, body)

    def check(self) -> None:
        """Read a key, as :meth:`call` does."""
        self.call("/v3/kv/range", {"key": _base64(_ROOT), "range_end": _base64(f"{_ROOT[:-1]}0"), "limit": "1"})

    def _authenticate(self) -> None:
        self._auth_token = ""
        name_and_password = {"name": self._credentials.user, "password": self._credentials.password}
        self._auth_token = str(self._call_any("/v3/auth/authenticate", name_and_password).get("token", ""))

    def _call_any(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        why = ""
        count = len(self._endpoints.addresses)
        for index in [(self._current + offset) % count for offset in range(count)]:
            try:
                answer = self._call_one(index, path, body)
            except (OSError, http.client.HTTPException, ValueError) as error:
                why = why or str(getattr(error, "reason", "") or error) or type(error).__name__
                continue
            self._current = index
            return answer
        raise EtcdUnavailableError(f"etcd at {self._endpoints} does not answer ({why})")

    def _call_one(self, index: int, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        host, port = self._endpoints.addresses[index]
        url = f"http{'s' if self._endpoints.tls else ''}://{f'[{host}]' if ':' in host else host}:{port}{path}"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        if self._auth_token:
            request.add_header("Authorization", self._auth_token)
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                return _parsed(response)
        except urllib.error.HTTPError as refusal:
            with refusal:
                document = _parsed(refusal)
        code, message = document.get("code"), str(document.get("message") or document.get("error"))
        if code == _NOT_FOUND:
            raise _LeaseExpiredError(message)
        if code == _UNAUTHENTICATED and self._auth_token:
            raise _UnauthenticatedError(message)
        if code in (_INVALID_ARGUMENT, _PERMISSION_DENIED, _UNAUTHENTICATED):
            raise ConfigError(
                f"etcd at {self._endpoints} rejects this user: {message}. Set ETCDCTL_USER and ETCDCTL_PASSWORD, and "
                f"allow the user to read and write all keys below {_ROOT}."
            )
        raise http.client.HTTPException(message)


def _parsed(response: IO[bytes]) -> dict[str, Any]:
    document = json.loads(response.read())
    if not isinstance(document, dict):
        raise http.client.HTTPException(f"its answer is not a JSON object: {str(document)[:100]}")
    return document


class _UnauthenticatedError(PacelineError):
    """The authentication token has expired."""


# --- What a job keeps in etcd ---


class EtcdRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value of a job's key ``run``.

    Attributes:
        term: of the leader that has written it.
        nodes: the node set, in the order of succession.
        group: the nodes of the last group of workers that may act, sorted; the leader writes it before it forms that
            group.
    """

    term: int
    leader: str
    config_epoch: int
    nodes: tuple[str, ...]
    group: tuple[str, ...] = ()


@dataclass(frozen=True)
class EtcdSnapshot:
    """A job's keys at one revision of etcd.

    Attributes:
        record: the value of ``run``; None if there is no such key.
        record_revision: the revision that has last changed ``run``; 0 if there is no such key.
        holder: the value of ``leader``, a node whose etcd lease has not expired; "" if there is no such key.
        holder_revision: the revision that has last changed ``leader``.
        alive: the nodes whose etcd lease has not expired.
    """

    record: EtcdRecord | None = None
    record_revision: int = 0
    holder: str = ""
    holder_revision: int = 0
    alive: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Unavailable:
    """No member of etcd answers.

    Attributes:
        reason: which members, and the first one's error, as text.
    """

    reason: str


@dataclass(frozen=True)
class Read:
    """Read a job's keys."""


@dataclass(frozen=True)
class Write:
    """Write ``run`` and take ``leader``, unless one of them has changed since a snapshot.

    Attributes:
        record: the new value of ``run``.
    """

    seen: EtcdSnapshot
    record: EtcdRecord


@dataclass(frozen=True)
class Resign:
    """Delete ``leader``, if this node holds it."""


Reply = EtcdSnapshot | Unavailable
Operation = Read | Write | Resign


class EtcdSession:
    """One node's session: a thread that keeps the node's etcd lease alive, and reads and writes the job's keys.

    The keys ``leader`` and ``nodes/NODE`` are bound to the etcd lease, so they vanish when the node has not kept it
    alive for ``ttl_s``.

    Args:
        client: used by the thread alone from now on.
        ttl_s: of the etcd lease, in whole seconds.
    """

    def __init__(self, client: EtcdClient, node: str, ttl_s: int, wake: Callable[[], None]) -> None:
        self._client = client
        self._node = node
        self._ttl_s = ttl_s
        self._wake = wake
        self._prefix = ""
        self._lease = ""
        self._keep_at = 0.0
        self._answers = True
        self._operations: queue.Queue[Operation | None] = queue.Queue()
        self._replies: deque[tuple[Operation | None, Reply]] = deque()
        self._deletes = False  # the job's keys, at the end
        self._thread: threading.Thread | None = None

    def submit(self, operation: Operation, job: str) -> None:
        """Execute an operation on the keys of this job, always the same one; the reply comes later."""
        self._operations.put(operation)
        if self._thread is None:
            self._prefix = f"{_ROOT}{job}/"
            self._thread = threading.Thread(target=self._run, name="etcd", daemon=True)
            self._thread.start()

    def take_replies(self) -> list[tuple[Operation | None, Reply]]:
        """Return the replies so far, each with its operation; None if the session itself has noticed a change."""
        replies = []
        while self._replies:
            replies.append(self._replies.popleft())
        return replies

    def close(self, *, deletes: bool) -> None:
        """End the etcd lease.

        Args:
            deletes: delete the job's keys, if this node is the leader.
        """
        if self._thread is not None:
            self._deletes = deletes
            self._operations.put(None)
            self._thread.join()

    # The thread.

    def _run(self) -> None:
        while True:
            if time.monotonic() >= self._keep_at:
                self._attempt(None, self._keep)
            try:
                operation = self._operations.get(timeout=max(0.0, self._keep_at - time.monotonic()))
            except queue.Empty:
                continue
            if operation is None:
                break
            self._attempt(operation, partial(self._execute, operation))
        if self._answers:
            with suppress(PacelineError):
                self._end()

    def _attempt(self, operation: Operation | None, action: Callable[[], EtcdSnapshot | None]) -> None:
        try:
            snapshot = action()
            if snapshot is None and not self._answers:
                snapshot = self._execute(Read())
        except PacelineError as error:
            # A user that was rejected at the start is an error; one that is rejected later may be allowed again.
            self._answers = False
            self._post(operation, Unavailable(str(error)))
            return
        except (LookupError, TypeError, ValueError) as error:
            self._answers = False
            self._post(operation, Unavailable(f"etcd's answer cannot be read ({error!r})"))
            return
        self._answers = True
        if snapshot is not None:
            self._post(operation, snapshot)

    def _post(self, operation: Operation | None, reply: Reply) -> None:
        self._replies.append((operation, reply))
        self._wake()

    def _keep(self) -> EtcdSnapshot | None:
        """Keep the etcd lease alive; return the keys if it had expired."""
        self._keep_at = time.monotonic() + self._ttl_s / 3
        if self._lease:
            answer = self._client.call("/v3/lease/keepalive", {"ID": self._lease})
            if int(answer.get("result", {}).get("TTL", 0)) > 0:
                return None
        self._grant()
        return self._execute(Read())

    def _grant(self) -> None:
        """Get an etcd lease, and show with it that this node is alive."""
        self._lease = str(self._client.call("/v3/lease/grant", {"TTL": str(self._ttl_s)})["ID"])
        self._keep_at = time.monotonic() + self._ttl_s / 3
        alive = {"request_put": {"key": self._key(f"nodes/{self._node}"), "lease": self._lease}}
        self._client.call("/v3/kv/txn", {"success": [alive]})

    def _execute(self, operation: Operation) -> EtcdSnapshot:
        if not self._lease:
            self._grant()
        match operation:
            case Read():
                answer = self._client.call("/v3/kv/range", self._all_keys)
            case Resign():
                delete = {"request_delete_range": {"key": self._key("leader")}}
                answer = self._transact([self._is_leader], [delete])
            case Write(seen, _):
                compare = [
                    {"key": self._key(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
                    for key, revision in (("leader", seen.holder_revision), ("run", seen.record_revision))
                ]
                try:
                    answer = self._transact(compare, self._puts(operation.record))
                except _LeaseExpiredError:
                    self._grant()
                    answer = self._transact(compare, self._puts(operation.record))
        return self._snapshot(answer)

    def _end(self) -> None:
        if self._deletes:
            self._transact([self._is_leader], [{"request_delete_range": self._all_keys}])
        if self._lease:
            self._client.call("/v3/lease/revoke", {"ID": self._lease})

    # Keys.

    def _key(self, name: str) -> str:
        return _base64(self._prefix + name)

    @property
    def _all_keys(self) -> dict[str, str]:
        return {"key": self._key(""), "range_end": _base64(f"{self._prefix[:-1]}0")}  # "0" follows "/"

    @property
    def _is_leader(self) -> dict[str, str]:
        return {"key": self._key("leader"), "target": "VALUE", "result": "EQUAL", "value": _base64(self._node)}

    def _puts(self, record: EtcdRecord) -> list[dict[str, Any]]:
        leader = {"key": self._key("leader"), "value": _base64(self._node), "lease": self._lease}
        run = {"key": self._key("run"), "value": base64.b64encode(msgspec.json.encode(record)).decode()}
        return [{"request_put": leader}, {"request_put": run}]

    def _transact(self, compare: list[dict[str, str]], success: list[dict[str, Any]]) -> dict[str, Any]:
        """Execute operations if all comparisons hold; return all keys as they are then, or as they are otherwise."""
        read = {"request_range": self._all_keys}
        body = {"compare": compare, "success": [*success, read], "failure": [read]}
        answer: dict[str, Any] = self._client.call("/v3/kv/txn", body)["responses"][-1]["response_range"]
        return answer

    def _snapshot(self, answer: Mapping[str, Any]) -> EtcdSnapshot:
        record, record_revision, holder, holder_revision, alive = None, 0, "", 0, set()
        for pair in answer.get("kvs", ()):
            name = base64.b64decode(pair["key"]).decode().removeprefix(self._prefix)
            value, revision = base64.b64decode(pair.get("value", "")), int(pair["mod_revision"])
            if name == "run":
                record, record_revision = _read_record(value), revision
            elif name == "leader":
                holder, holder_revision = value.decode(), revision
            elif name.startswith("nodes/"):
                alive.add(name.removeprefix("nodes/"))
        return EtcdSnapshot(record, record_revision, holder, holder_revision, frozenset(alive))


def _read_record(value: bytes) -> EtcdRecord:
    try:
        return msgspec.json.decode(value, type=EtcdRecord)
    except ValueError as error:
        raise EtcdUnavailableError(f"the run's key in etcd is not this version's ({error})") from error


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
