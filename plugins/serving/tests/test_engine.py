"""``paceline serve --engine``: OpenAI's own client asks a model through the gateway, while engines die and change."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from plugins.serving.tests.chat_model import write_chat_model
from tests.processes import Processes
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.core.errors import ConfigError
from paceline_serving.access import AccessPolicy
from paceline_serving.gateway import EngineProcess, Gateway, engine_command, open_language_model
from paceline_serving.model import ServingOptions

TOKEN = "0123456789abcdef0123"
ASK: dict[str, Any] = {"model": "first", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}


def test_vllm_is_started_by_its_own_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"--engine vllm needs vLLM, whose command is not on PATH"):
        engine_command("vllm", "model", 8001)
    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    command = engine_command("vllm", "model", 8001, ["--tensor-parallel-size", "2"])
    assert command == [
        *(str(tmp_path / "vllm"), "serve", "model", "--host", "127.0.0.1", "--port", "8001"),
        *("--tensor-parallel-size", "2"),
    ]
    with pytest.raises(ConfigError, match=r"is neither a run nor a directory of transformers: it has no config.json"):
        open_language_model(tmp_path)


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_an_answer_passes_in_pieces_with_the_name_in_it(kind: str, tmp_path: Path) -> None:
    end = b"\n\n" if kind == "text/event-stream" else b""
    named = b'{"text": "\\"model\\": \\"a@main\\"", "model": "%b", "data": ["m", "mo", ' + end
    sent = named % b"a@main"

    async def received(pieces: list[bytes]) -> list[bytes]:
        async def send() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        answer = httpx.Response(200, headers={"content-type": kind}, content=send())
        gateway = Gateway("first", "transformers", (), ServingOptions(), AccessPolicy(()))
        passed = gateway._pass_on(EngineProcess("transformers", tmp_path / "a", ()), answer)
        return [piece async for piece in passed]

    for cut in range(1, len(sent)):
        assert b"".join(asyncio.run(received([sent[:cut], sent[cut:]]))) == named % b"first"
    pieces = asyncio.run(received([sent, *[b"1.5, " * 2000 + end] * 100]))
    assert len(pieces) == 101
    assert pieces[0] == named % b"first"
    assert max(map(len, pieces)) <= 10_002


@contextmanager
def served(processes: Processes, model: Path, *options: str) -> Iterator[tuple[dict[str, Any], psutil.Process]]:
    popen = processes.start(
        [
            *(sys.executable, "-m", "paceline", "serve", str(model), "--engine", "transformers"),
            *("--engine-args", "--device cpu --attn-implementation eager", "--port", "0", "--json", *options),
        ]
    )
    assert popen.stdout is not None
    line = popen.stdout.readline()
    assert line, processes.finish(popen).stderr
    yield json.loads(line), psutil.Process(popen.pid)
    popen.send_signal(signal.SIGTERM)
    done = processes.finish(popen, timeout_s=60)
    assert done.returncode == 0, done.stderr


def engines_of(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children() if any("transformers.cli" in word for word in child.cmdline())]


def client_of(ready: dict[str, Any], token: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{ready['url']}/v1", api_key=token, max_retries=0, timeout=60)


def greedy(directory: Path, tokens: int) -> str:
    """Return what transformers alone generates."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    words = tokenizer.apply_chat_template(
        ASK["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        answer = model.generate(**words, max_new_tokens=tokens, do_sample=False)
    said: str = tokenizer.decode(answer[0, words["input_ids"].shape[1] :], skip_special_tokens=True)
    return said


@pytest.mark.system
def test_openais_client_has_the_answers_of_generate_alone(run_processes: Processes, tmp_path: Path) -> None:
    first = write_chat_model(tmp_path / "first", 0)
    expected = greedy(first, 24)
    secret = tmp_path / "token"
    secret.write_text(f"{TOKEN}\n")
    secret.chmod(0o600)
    options = ("--token-file", str(secret), "--cors-origin", "https://example.org", "--receive-timeout", "3s")
    with served(run_processes, first, *options) as (ready, process):
        assert not any(TOKEN in word for child in process.children(recursive=True) for word in child.cmdline())
        with pytest.raises(openai.AuthenticationError, match="the token is missing or wrong"):
            client_of(ready).chat.completions.create(**ASK)
        client = client_of(ready, TOKEN)
        assert [model.id for model in client.models.list()] == ["first"]
        said = client.chat.completions.create(**ASK, max_tokens=2)
        pieces = client.chat.completions.create(**ASK, max_tokens=2, stream=True)
        assert {said.model, *(piece.model for piece in pieces)} == {"first"}

        with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9'; this server has 'first'"):
            client.chat.completions.create(**{**ASK, "model": "gpt-9"})

        def ask(number: int) -> str:
            if number % 2:
                return client.chat.completions.create(**ASK, max_tokens=24).choices[0].message.content or ""
            pieces = client.chat.completions.create(**ASK, max_tokens=24, stream=True)
            return "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(16)))
        assert answers == [expected] * 16
        assert client.chat.completions.create(**ASK, max_tokens=24, stop=[expected[3]]).choices[0].message.content in (
            expected[: expected.index(expected[3])],
            expected[: expected.index(expected[3]) + 1],  # transformers' serve keeps the stop word
        )
        sampled = [
            client.chat.completions.create(**{**ASK, "temperature": 1.0}, max_tokens=24, seed=seed).choices[0].message
            for seed in (1, 1, 2)
        ]
        assert sampled[0].content == sampled[1].content != sampled[2].content
        page = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
        may = httpx.options(f"{ready['url']}/v1/chat/completions", headers=page)
        assert (may.status_code, may.headers["access-control-allow-origin"]) == (200, "https://example.org")
        foreign = httpx.options(f"{ready['url']}/v1/models", headers={**page, "Origin": "https://example.com"})
        assert foreign.status_code == 405
        metrics = httpx.get(f"{ready['url']}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).text
        assert 'paceline_requests_total{code="200"} 22.0' in metrics
        assert httpx.get(f"{ready['url']}/metrics").status_code == 401
        address = httpx.URL(ready["url"])
        with socket.create_connection((address.host, address.port or 80), timeout=30) as slow:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\n"
            slow.sendall(f"{head}Content-Length: 9\r\n\r\n{{".encode())  # and no more
            answer = b"".join(iter(lambda: slow.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.system
def test_an_engine_that_dies_or_changes_cuts_no_answer_without_an_error(
    run_processes: Processes, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    first, second = (write_chat_model(tmp_path / name, seed) for seed, name in enumerate(("first", "second")))
    expected = [greedy(first, 64), greedy(second, 64)]
    whole: list[str] = []
    failed: list[Exception] = []
    ended = threading.Event()

    def ask(client: openai.OpenAI, stream: bool) -> None:
        while not ended.is_set():
            try:
                if stream:
                    pieces = client.chat.completions.create(**ASK, max_tokens=64, stream=True)
                    whole.append("".join(p.choices[0].delta.content or "" for p in pieces if p.choices))
                else:
                    answer = client.chat.completions.create(**ASK, max_tokens=64)
                    whole.append(answer.choices[0].message.content or "")
            except openai.OpenAIError as error:
                failed.append(error)
                time.sleep(0.2)

    with served(run_processes, first, "--drain-delay", "100ms", "--hang-timeout", "4s") as (ready, process):
        client = client_of(ready)
        clients = [threading.Thread(target=ask, args=(client, bool(number % 2))) for number in range(4)]
        try:
            for thread in clients:
                thread.start()
            wait_until(lambda: len(whole) > 8, "answers of the first engine")
            (engine,) = engines_of(process)
            engine.kill()
            wait_until(lambda: failed, "an error of the client")
            seen = len(whole)
            wait_until(lambda: len(whole) > seen + 4, "answers of the next engine", timeout_s=120)
            errors = len(failed)
            assert set(whole) == {expected[0]}, "whole answers only"

            (engine,) = engines_of(process)
            engine.suspend()  # it lives, and answers nothing
            health = f"{ready['url']}/health"
            wait_until(lambda: httpx.get(health).status_code == 503, "that the server is not ready")
            wait_until(lambda: len(failed) > errors, "an error of the client")
            seen = len(whole)
            wait_until(lambda: len(whole) > seen + 4, "answers of the next engine", timeout_s=120)
            assert httpx.get(health).status_code == 200
            errors = len(failed)
            assert set(whole) == {expected[0]}, "whole answers only"

            deployed = run_processes.paceline("deploy", ready["url"], second, timeout_s=120)
            assert deployed.returncode == 0, deployed.stderr
            seen = len(whole)
            wait_until(lambda: len(whole) > seen + 8, "answers of the second model")
        finally:
            ended.set()
            for thread in clients:
                thread.join(60)
        assert len(failed) == errors, "no request fails while the model is replaced"
        assert set(whole) == set(expected)
        assert whole[-1] == expected[1]
        wait_until(lambda: len(engines_of(process)) == 1, "the end of the engine that was replaced")
        missing = run_processes.paceline("deploy", ready["url"], tmp_path)
        assert missing.returncode != 0
        assert "neither a run nor a directory" in missing.stderr
        # What was accepted is finished before the server ends.
        last = threading.Thread(target=lambda: whole.append(ask_once(client)))
        last.start()
        wait_until(lambda: "in_flight 1.0" in httpx.get(f"{ready['url']}/metrics").text, "the last request")
    last.join(60)
    assert len(whole[-1]) > len(expected[1])


HANGS = """#!{python}
import http.server, json, sys, threading

answered = threading.Semaphore(1)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        answered.acquire()  # the second request waits for good
        self.do_GET()

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.mark.system
def test_an_engine_whose_health_is_well_but_that_computes_nothing_is_replaced(
    run_processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "vllm").write_text(HANGS.replace("{python}", sys.executable))
    (tmp_path / "vllm").chmod(0o755)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    popen = run_processes.start(
        [
            *(sys.executable, "-m", "paceline", "serve", str(tmp_path / "model"), "--engine", "vllm", "--port", "0"),
            *("--json", "--hang-timeout", "1s", "--drain-delay", "100ms"),
        ],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert popen.stdout is not None
    ready = json.loads(popen.stdout.readline())
    answer = httpx.post(f"{ready['url']}/v1/completions", json={"prompt": "a"}, timeout=60)
    assert answer.status_code == 502
    assert "ended before it answered" in answer.text
    popen.send_signal(signal.SIGTERM)
    done = run_processes.finish(popen, timeout_s=60)
    assert "has stood still for" in done.stderr
    assert done.returncode == 0


def ask_once(client: openai.OpenAI) -> str:
    return client.chat.completions.create(**ASK, max_tokens=400).choices[0].message.content or ""
