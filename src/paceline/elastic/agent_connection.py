"""A command's connection to the agent of an active run, over the agent's control socket."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import msgspec

from paceline.core.errors import ConfigError, PacelineError, RunDirectoryError
from paceline.core.files import parse_json, read_document
from paceline.elastic.control import ANSWER_S, LONGEST, RunStatus, user_of
from paceline.runs.directory import RunDirectory


class AgentConnection:
    """A command's connection to the agent of an active run.

    Raises:
        RunDirectoryError: no agent is active on this run.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_S)
        try:
            path = parse_json(read_document(directory.agent))["socket"]
            self._socket.connect(path)
            if user_of(self._socket) != os.geteuid():
                raise PermissionError("it is another user's")
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._socket.close()
            raise RunDirectoryError(_describe_no_agent(directory, error)) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def status(self) -> RunStatus:
        """Return the job's status.

        Raises:
            AgentGone: the job has ended.
        """
        return self._ask({"status": {}})

    def scale(self, **wanted: int) -> RunStatus:
        """Request another ``nproc`` or number of ``nodes``; return at once, with the new target.

        Raises:
            ConfigError: the number is not possible.
            AgentGone: the job has ended.
        """
        return self._ask({"scale": wanted})

    def gather(self) -> RunStatus:
        """Make training wait, after the step, until all wanted workers take part.

        Raises:
            AgentGone: the job has ended.
        """
        return self._ask({"gather": {}})

    def _ask(self, request: Mapping[str, Any]) -> RunStatus:
        try:
            self._socket.send(json.dumps(request).encode(), socket.MSG_NOSIGNAL)
            content = self._socket.recv(LONGEST)
        except TimeoutError:
            raise PacelineError(f"the run's agent did not answer within {ANSWER_S:g} s.") from None
        except ConnectionError:
            content = b""
        if not content:
            raise AgentGone("the job ended.")
        answer = json.loads(content)
        if "error" in answer:
            raise ConfigError(answer["error"])
        return msgspec.convert(answer, RunStatus)


class AgentGone(PacelineError):
    """The job, and its agent with it, has ended."""


def _describe_no_agent(directory: RunDirectory, error: Exception) -> str:
    if not directory.exists() and not directory.path.is_dir():
        return f"there is no run {directory.path}."
    if directory.is_running() and isinstance(error, FileNotFoundError):
        return f"{directory.path} is running, but without an agent. Only runs with --recover inplace have one."
    if directory.is_running():
        return f"the agent of {directory.path} cannot be reached: {error}."
    return f"{directory.path} is not running. Continue it with: paceline resume {directory.path}"
