"""Engines of ``paceline serve --engine``: servers of language models, each a process that Paceline starts and ends."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Literal

import httpx
import psutil

from paceline.core.built_in import DIRECTORY_FORMATS
from paceline.core.errors import ConfigError, ServingError
from paceline.core.parent_death import kill_with_parent_command
from paceline.core.plugins import import_object, install_command
from paceline.core.sockets import free_loopback_port

EngineName = Literal["transformers", "vllm"]

_POLL_S, _STOP_S = 0.2, 10.0

log = logging.getLogger("paceline_serving")


def _transformers(model: str, port: int) -> list[str]:
    # Its command line, run by this interpreter: the one that PATH finds may be of another environment.
    main = "from transformers.cli.transformers import main; main()"
    return [sys.executable, "-c", main, "serve", model, "--host", "127.0.0.1", "--port", str(port)]


def _vllm(model: str, port: int) -> list[str]:
    program = shutil.which("vllm")
    if program is None:
        raise ConfigError("--engine vllm needs vLLM, whose command is not on PATH. Install it: pip install vllm")
    return [program, "serve", model, "--host", "127.0.0.1", "--port", str(port)]


_COMMANDS: Mapping[EngineName, Callable[[str, int], list[str]]] = {"transformers": _transformers, "vllm": _vllm}


def engine_command(name: EngineName, model: str, port: int, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command of an engine that serves the model of a directory in its own, on a port of this machine.

    Raises:
        ConfigError: its program or libraries are not installed.
    """
    if name == "transformers":
        try:
            import fastapi  # noqa: F401
            import openai  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"--engine transformers: {error}. Install it: {install_command('engine')}") from error
    return [*_COMMANDS[name](model, port), *arguments]


def open_language_model(location: Path) -> Path:
    """Return the directory of transformers for a run, which is exported, or for a directory that is one.

    Raises:
        UserError: it is neither, or the run cannot be exported.
        ExportError: what was exported does not compute the same as the trained model.
    """
    if (location / "config.json").is_file():
        return location
    if not (location / "run.toml").is_file():
        raise ConfigError(f"{location} is neither a run nor a directory of transformers: it has no config.json.")
    from paceline.export.export import ExportedDirectory, ExportRequest

    export_hf: Callable[[ExportRequest], ExportedDirectory] = import_object(DIRECTORY_FORMATS["hf"])

    log.info("exporting %s", location)
    with redirect_stdout(sys.stderr):  # which libraries print to when they are imported
        return Path(export_hf(ExportRequest(run=location)).directory)


class EngineProcess:
    """One process of an engine, with the requests that it is answering.

    Attributes:
        model: the directory that it serves.
        name: by which it knows the model.
        url: where it listens, on loopback.
        answers_as: its name of the model in answers.
        in_flight: requests that have no whole answer yet.
        heard_at: when it last answered a probe, by ``time.monotonic``.
        moved_at: when it last sent a part of an answer, or computed one, or had none to compute.
    """

    def __init__(self, name: EngineName, model: Path, arguments: Sequence[str]) -> None:
        self.model = model.resolve()
        self.name = self.model.name
        self.answers_as = f"{self.name}@main" if name == "transformers" else self.name
        self.in_flight = 0
        self.heard_at = 0.0
        self.moved_at = 0.0
        self._kind = name
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""

    async def start(self, client: httpx.AsyncClient, timeout_s: float) -> None:
        """Start the process, and wait until it has answered a request.

        Raises:
            ConfigError: it cannot be started.
            ServingError: it ended, or has not answered in time.
        """
        port = free_loopback_port()
        self.url = f"http://127.0.0.1:{port}"
        command = kill_with_parent_command(engine_command(self._kind, self.name, port, self._arguments))
        # A session of its own: Ctrl-C reaches Paceline alone, which lets the engine finish its answers.
        self._process = await asyncio.create_subprocess_exec(
            *command,
            cwd=self.model.parent,  # so answers name the model, and not where it is
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._answers(client):
                    if self._process.returncode is not None:
                        raise ServingError(
                            f"--engine {self._kind} ended with exit code {self._process.returncode} before it was "
                            "ready; its output above has the cause."
                        )
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            await self.stop()
            raise ServingError(
                f"--engine {self._kind} was not ready after {timeout_s:g} s. Allow more: --startup-timeout."
            ) from None
        except BaseException:
            await self.stop()
            raise
        self.heard_at = time.monotonic()
        self.moved_at = self.heard_at

    async def _answers(self, client: httpx.AsyncClient) -> bool:
        """Return whether it generates a token; the first one may take many seconds more than the next ones."""
        body = {"model": self.name, "prompt": "a", "max_tokens": 1}
        with suppress(httpx.TransportError):
            if (await client.get(f"{self.url}/health")).status_code != 200:
                return False
            answer = await client.post(f"{self.url}/v1/completions", json=body)
            if answer.status_code == 200:
                return True
            raise ServingError(f"--engine {self._kind} cannot generate with {self.model}: {answer.text:.500}")
        return False

    async def probe(self, client: httpx.AsyncClient, limit_s: float) -> None:
        """Ask again and again whether it is well; an answer within ``limit_s`` is noted in ``heard_at``."""
        while self.is_alive:
            await asyncio.sleep(limit_s / 8)
            with suppress(httpx.TransportError):
                if (await client.get(f"{self.url}/health", timeout=limit_s)).status_code == 200:
                    self.heard_at = time.monotonic()

    def cpu_s(self) -> float:
        """Return the CPU time that it and what it has started have used."""
        assert self._process is not None
        used_s = 0.0
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            for each in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    used_s += sum(each.cpu_times()[:2])
        return used_s

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.returncode is None

    async def wait(self) -> int:
        """Return its exit code when it has ended."""
        assert self._process is not None
        return await self._process.wait()

    def kill(self) -> None:
        """End it at once, also if it is stopped."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """End the process and all that it has started."""
        if self._process is None or not self.is_alive:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _STOP_S)
                break
