"""Tokens a second of an engine under 32 streams: through Paceline's gateway, and asked directly, in turns."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

from benchmarks.serving.servers import end, free_port, ready_address, wait

STREAMS = 32
_TOKENS = 48
_WARMUP_S, _TURN_S = 4.0, 5.0


def write_model(directory: Path) -> None:
    """A Llama of 29 million untrained parameters, and a tokenizer of characters."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", *map(chr, range(32, 127))])}
    characters = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", bos_token="<s>").save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=7,
        num_attention_heads=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,  # each answer has the tokens that are asked for
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def measure(directory: Path, seconds: float) -> dict[str, float]:
    """Return the tokens a second of both, from turns of the same engine."""
    write_model(directory / "model")
    port = free_port()
    words = ("--engine", "transformers", "--engine-args", "--continuous-batching --device cpu --log-level error")
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "serve", str(directory / "model"), "--port", str(port), *words],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        wait(process, ready_address(port))
        (engine,) = (child.cmdline() for child in psutil.Process(process.pid).children())
        return asyncio.run(_take_turns(port, int(engine[engine.index("--port") + 1]), seconds))
    finally:
        end(process)


async def _take_turns(gateway: int, engine: int, seconds: float) -> dict[str, float]:
    tokens = {gateway: 0, engine: 0}
    turns = max(1, round(seconds / _TURN_S))
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits()) as client:
        await _load(client, gateway, _WARMUP_S)
        for turn in range(turns):
            for port in list(tokens) if turn % 2 else reversed(tokens):
                tokens[port] += await _load(client, port, _TURN_S)
    return {
        "tokens_per_s": tokens[gateway] / turns / _TURN_S,
        "alone_per_s": tokens[engine] / turns / _TURN_S,
    }


async def _load(client: httpx.AsyncClient, port: int, seconds: float) -> int:
    """Keep all streams busy for some seconds; return the tokens that came in that time."""
    ends_at = time.monotonic() + seconds
    found = 0

    async def ask(number: int) -> None:
        nonlocal found
        body = {"model": "model", "prompt": f"stream {number}", "max_tokens": _TOKENS, "stream": True}
        while time.monotonic() < ends_at:
            async with client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if time.monotonic() > ends_at:
                        return
                    found += line.startswith("data: {") and bool(json.loads(line[6:])["choices"])

    await asyncio.gather(*(ask(number) for number in range(STREAMS)))
    return found
