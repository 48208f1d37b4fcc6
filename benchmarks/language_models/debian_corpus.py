"""A GPT from scratch on 10 million tokens of Debian's texts, with one hash on any number of processes.

``python -m benchmarks.language_models.debian_corpus DIR`` trains a tokenizer and encodes the manuals and documentation
of this machine, then trains with 1, 2 and 3 processes, and with 2 that are killed and 3 that resume from ``s3://``
(moto). It prints a row for each run, and fails if a hash differs or an audit is not clean.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, PreTrainedTokenizerFast

_ROOT = Path(__file__).parents[2]
_SOURCES = ("/usr/share/common-licenses", "/usr/share/man", "/usr/share/doc")
_VOCABULARY, _CONTEXT, _PACK = 4096, 128, 128
_TOKENS = 10_000_000
_STEPS, _KILL_AFTER = 200, 80


def read_texts() -> Iterator[str]:
    """Yield the texts of installed packages, each once, in the order of their paths; markup of manuals is left out."""
    seen: set[bytes] = set()
    for folder in map(Path, _SOURCES):
        for path in sorted(folder.rglob("*")):
            if path.is_symlink() or not path.is_file() or path.suffix in (".html", ".json", ".js", ".png", ".pdf"):
                continue
            content = path.read_bytes()
            if content.startswith(b"\x1f\x8b"):
                content = gzip.decompress(content)
            try:
                text = content.decode()
            except UnicodeDecodeError:
                continue
            if "man" in folder.parts:
                text = re.sub(r"\\f.|\\&", "", re.sub(r"(?m)^[.'].{0,3}\\\".*\n", "", text)).replace("\\-", "-")
            digest = hashlib.sha256(text.encode()).digest()
            if "\0" not in text and len(text) > 200 and digest not in seen:
                seen.add(digest)
                yield text


def write_corpus(folder: Path) -> tuple[int, int]:
    """Write a tokenizer, a configuration and ``texts.jsonl``; return the numbers of texts and of tokens."""
    texts = list(read_texts())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((text[:20_000] for text in texts[::8]), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder / "gpt")
    GPT2Config(
        vocab_size=_VOCABULARY, n_positions=_CONTEXT, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    ).save_pretrained(folder / "gpt")
    tokens = count = 0
    step = 1 + len(texts) // 4096  # texts of all sources, not of the first one alone
    with (folder / "texts.jsonl").open("w") as file:
        for text in (text for start in range(step) for text in texts[start::step]):
            tokens += len(tokenizer.encode(text).ids) + 1
            count += 1
            file.write(json.dumps({"text": text}) + "\n")
            if tokens >= _TOKENS:
                break
    return count, tokens


def _start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "paceline", *words], cwd=folder)


def _train(folder: Path, run: str, nproc: int, *more: str) -> list[str]:
    return [
        *("train", "hf:gpt", "--from-scratch", "--data", "texts.jsonl", "--pack", str(_PACK), "--set", "lr=0.001"),
        *("--nproc", str(nproc), "--microbatches", "6", "--global-batch-size", "48", "--max-steps", str(_STEPS)),
        *("--threads", "1", "--quiet", "--run-dir", run, *more),
    ]


def _finish(popen: subprocess.Popen[bytes]) -> None:
    if popen.wait():
        raise SystemExit(f"{popen.args!r} ended with {popen.returncode}")


def _kill_at(popen: subprocess.Popen[bytes], client: Any) -> None:
    """Kill all processes of a run, once the store has the checkpoint of a step."""
    name = f"{_KILL_AFTER:08d}"
    while not any(name in each["Key"] for each in client.list_objects_v2(Bucket="bucket").get("Contents", [])):
        if popen.poll() is not None:
            raise SystemExit(f"{popen.args!r} ended before it could be killed")
        time.sleep(0.2)
    workers = psutil.Process(popen.pid).children(recursive=True)
    popen.kill()
    popen.wait()
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends with its parent
            worker.kill()


def _describe(folder: Path, run: Path, seconds: float) -> str:
    result = json.loads((run / "result.json").read_text())
    audited = subprocess.run(
        [sys.executable, "-m", "paceline", "audit", run], cwd=folder, capture_output=True, text=True, check=True
    )
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if record.get("loss") is not None]
    print(f"{run.name}: {seconds:.0f} s, loss {losses[0]:.3f} to {losses[-1]:.3f}, {result['model_sha256']}")
    print(audited.stdout.strip(), flush=True)
    return str(result["model_sha256"])


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    count, tokens = write_corpus(folder)
    print(f"{count:,} texts, {tokens:,} tokens", flush=True)
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    server = subprocess.Popen(
        [sys.executable, _ROOT / "plugins" / "stores" / "tests" / "s3_server.py"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        os.environ["AWS_ENDPOINT_URL"] = server.stdout.readline().strip()
        client = boto3.client("s3")
        client.create_bucket(Bucket="bucket")
        hashes = set()
        for nproc in (1, 2, 3):
            began = time.monotonic()
            _finish(_start(folder, *_train(folder, f"w{nproc}", nproc)))
            hashes.add(_describe(folder, folder / f"w{nproc}", time.monotonic() - began))
        began = time.monotonic()
        saved = ("--checkpoint-every", "20steps", "--backup-to", "s3://bucket/run1", "--max-restarts", "0")
        _kill_at(_start(folder, *_train(folder, "killed", 2, *saved)), client)
        shutil.rmtree(folder / "killed")
        _finish(_start(folder, "resume", "s3://bucket/run1", "--nproc", "3", "--run-dir", "resumed", "--quiet"))
        hashes.add(_describe(folder, folder / "resumed", time.monotonic() - began))
    finally:
        server.kill()
        server.wait()
    if len(hashes) > 1:
        raise SystemExit("the hashes differ")
    print("one hash")


if __name__ == "__main__":
    main()
