"""Documents that are read as the training goes: each once in an epoch, and none again after a restart."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch
from plugins.lm.tests.directories import TEXTS, save_model, train_tokenizer, write_lines
from pyarrow import parquet

from paceline.core.errors import DataError, TaskError
from paceline.data.audit import audit
from paceline.data.stream import StreamLoader
from paceline.runs.directory import RunDirectory
from paceline_lm.document_stream import DocumentStream
from paceline_lm.documents import pad_documents
from paceline_lm.encoding import Encoder
from paceline_lm.mixture import StreamMixture

pytestmark = pytest.mark.matrix

TOKENIZER = train_tokenizer()
RECORDS = [{"text": f"{TEXTS[n % 8] * (1 + n % 3)} Number {n}."} for n in range(400)]


def open_stream(place: object, pack: int | None = None, vocabulary: int = 320) -> DocumentStream:
    return DocumentStream(str(place), Encoder(TOKENIZER, 64), vocabulary, pack)


def loader_of(stream: Any) -> StreamLoader:
    return StreamLoader(
        stream,
        global_batch_size=12,
        num_microbatches=6,
        min_microbatch_size=1,
        seed=3,
        device=torch.device("cpu"),
        collate=pad_documents,
    )


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"Number (\d+)\.", text)]


def fetched(loader: StreamLoader, epoch: int, step: int, shards: range) -> list[list[int]]:
    found = loader.fetch(epoch, step, shards)
    return [[n for row in m.batch["input_ids"] for n in numbers(TOKENIZER.decode(row))] for m in found]


def epoch_of(stream: DocumentStream, epoch: int, cuts: list[int]) -> list[list[list[int]]]:
    ranks = [(loader_of(stream), range(a, b)) for a, b in itertools.pairwise(cuts)]
    steps = (
        [each for loader, shards in ranks for each in fetched(loader, epoch, step, shards)]
        for step in itertools.count()
    )
    return list(itertools.takewhile(bool, steps))


def count_bytes(stream: DocumentStream) -> list[int]:
    counts, read = [], stream._store.cat_file

    def counted(*args: Any, **options: Any) -> bytes:
        content = bytes(read(*args, **options))
        counts.append(len(content))
        return content

    stream._store.cat_file = counted
    return counts


def write_files(folder: Path) -> int:
    files = [write_lines(folder / f"web-{n}.jsonl", RECORDS[n * 150 : (n + 1) * 150]) for n in range(3)]
    return sum(file.stat().st_size for file in files)


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.aws)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, int]:
    """A pattern of files, and their bytes."""
    size = write_files(tmp_path)
    if request.param == "local":
        return f"{tmp_path}/web-*.jsonl", size
    client = request.getfixturevalue("aws")
    client.create_bucket(Bucket="corpus")
    for file in tmp_path.glob("web-*.jsonl"):
        client.upload_file(str(file), "corpus", file.name)
    return "s3://corpus/web-*.jsonl", size


def test_each_document_is_read_once_and_none_again_after_a_restart(place: tuple[str, int]) -> None:
    stream = open_stream(place[0])
    read = count_bytes(stream)
    expected = epoch_of(stream, 0, [0, 6])
    assert sorted(n for step in expected for each in step for n in each) == list(range(400))
    assert sum(read) < 1.5 * place[1]  # whatever the number of micro-batches; of tiny blocks, their last lines count
    again = epoch_of(stream, 1, [0, 1, 3, 6])
    assert sorted(n for step in again for each in step for n in each) == list(range(400))
    assert again != expected
    assert epoch_of(stream, 1, [0, 6]) == again
    first = [(loader_of(stream), range(4)), (loader_of(stream), range(4, 6))]
    for step in range(20):
        for loader, shards in first:
            loader.fetch(0, step, shards)
    saved: dict[str, Any] = {}
    for loader, shards in first:
        saved |= loader.positions(0, 20, shards)
    resumed = open_stream(place[0])
    read = count_bytes(resumed)
    ranks = [(loader_of(resumed), range(a, b)) for a, b in ((0, 2), (2, 4), (4, 6))]
    for loader, _ in ranks:
        loader.load_state_dict(json.loads(json.dumps(saved)))
    for step in range(20, len(expected)):
        assert [each for loader, shards in ranks for each in fetched(loader, 0, step, shards)] == expected[step]
    left = sum(len(each) for step in expected[20:] for each in step) / 400
    # The rest, and the block of each shard: at most a sixteenth of it.
    assert sum(read) < 1.5 * place[1] * (left + 2 / 16)


def test_packs_of_a_stream_have_each_document_once(tmp_path: Path) -> None:
    write_files(tmp_path)
    stream = open_stream(tmp_path / "web-*.jsonl", pack=64)
    for epoch in range(2):
        reader = stream.open(0, 1, epoch, seed=5)
        packs = _rest(reader)
        assert all(pack["input_ids"].shape == pack["position_ids"].shape == (64,) for pack in packs)
        assert sorted(n for pack in packs for n in numbers(TOKENIZER.decode(pack["input_ids"]))) == list(range(400))


def test_joined_documents_of_a_stream_have_each_token_once(tmp_path: Path) -> None:
    write_files(tmp_path)
    stream = DocumentStream(f"{tmp_path}/web-*.jsonl", Encoder(TOKENIZER, sys.maxsize), 320, 64, concat=True)
    every = [sum(len(d.tokens) for d in stream._encode(block)) for block in stream.blocks(1)]
    orders = []
    for epoch in range(2):
        reader = stream.open(0, 1, epoch, seed=5)
        samples = _rest(reader)
        assert sum(int(sample["num_tokens"]) for sample in samples) == sum(every)
        assert len(samples) < sum(every) / 64 + len(every)
        assert reader.state_dict()["units"] == 400
        orders.append(samples)
    assert not torch.equal(orders[0][0]["input_ids"], orders[1][0]["input_ids"])


def test_a_mixture_has_its_shares_and_every_pass_each_document_once(tmp_path: Path) -> None:
    """Of four shards, also if a source has less parts than these; and a reader continues anywhere."""
    write_lines(tmp_path / "web.jsonl", RECORDS)
    few = [{"text": f"{TEXTS[n % 8]} Number {1000 + n}."} for n in range(30)]
    parquet.write_table(pa.Table.from_pylist(few), tmp_path / "few.parquet", row_group_size=10)
    sources = [open_stream(tmp_path / name) for name in ("web.jsonl", "few.parquet")]
    mixture = StreamMixture(sources, [3, 1])
    readers = [mixture.open(shard, 4, 0, 7) for shard in range(4)]
    found: list[int] = []
    lengths = [0, 0]
    for item in range(400):
        for shard in range(4):
            if item == 150 + shard:
                state = json.loads(json.dumps(readers[shard].state_dict()))
                assert state["units"] == item
                readers[shard] = StreamMixture(sources, [3, 1]).open(shard, 4, 0, 7)
                readers[shard].load_state_dict(state)
            sample = next(readers[shard])
            found += numbers(TOKENIZER.decode(sample["input_ids"]))
            lengths[found[-1] >= 1000] += len(sample["input_ids"])
    assert lengths[0] / sum(lengths) == pytest.approx(0.75, abs=0.03)
    times = np.bincount(found)
    assert times[:400].min() >= 1  # in another order in each pass of a shard
    assert times[1000:].max() - times[1000:].min() <= 12
    again = [next(mixture.open(shard, 4, 0, 7)) for shard in range(4)]
    assert [n for sample in again for n in numbers(TOKENIZER.decode(sample["input_ids"]))] == found[:4]


def _rest(reader: Any) -> list[dict[str, torch.Tensor]]:
    samples = []
    while True:
        try:
            samples.append(next(reader))
        except StopIteration:
            return samples


def test_parquet_is_read_by_row_groups(tmp_path: Path) -> None:
    parquet.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "web.parquet", row_group_size=7)
    found = epoch_of(open_stream(tmp_path / "web.parquet"), 0, [0, 2, 6])
    assert sorted(n for step in found for each in step for n in each) == list(range(400))
    parquet.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "one.parquet")  # a row group, and six shards
    stream = open_stream(tmp_path / "one.parquet")
    shards = [_rest(stream.open(shard, 6, 0, 1)) for shard in range(6)]
    assert all(shards)
    words = [n for each in shards for sample in each for n in numbers(TOKENIZER.decode(sample["input_ids"]))]
    assert sorted(words) == list(range(400))
    state = stream.open(0, 6, 0, 1).state_dict()
    assert state.pop("blocks") == 6
    with pytest.raises(DataError, match="divides these files into 1 blocks, and this one makes 6"):
        stream.open(0, 6, 0, 1).load_state_dict(state)


@pytest.mark.system
@pytest.mark.slow
def test_a_mixture_is_killed_on_two_processes_and_resumed_on_three(run_processes: Any, tmp_path: Path) -> None:
    model = save_model(tmp_path / "llama")
    write_files(tmp_path)
    write_lines(tmp_path / "code.jsonl", RECORDS[::-7])
    data = f"stream:{tmp_path}/web-*.jsonl=0.7,stream:{tmp_path}/code.jsonl=0.3"
    options = (
        *("train", f"hf:{model}", "--data", data, "--pack", "64", "--tokens", "20K", "--microbatches", "6"),
        *("--global-batch-size", "12", "--threads", "1", "--log-every", "1", "--set", "lr=0.01", "--lora", "rank=2"),
    )
    alone = run_processes.paceline(*options, "--run-dir", "one", timeout_s=200)
    assert alone.returncode == 0, alone.stderr
    command = [sys.executable, "-m", "paceline", *options, "--run-dir", "killed", "--nproc", "2"]
    popen = run_processes.start([*command, "--checkpoint-every", "1steps", "--max-restarts", "0"])
    while popen.poll() is None and len(list((tmp_path / "killed" / "checkpoints").glob("step*"))) < 2:
        time.sleep(0.02)
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (*psutil.Process(popen.pid).children(recursive=True), psutil.Process(popen.pid)):
            process.kill()
    run_processes.finish(popen, timeout_s=60)
    assert not (tmp_path / "killed" / "result.json").exists()
    audited = audit(RunDirectory(tmp_path / "killed"))
    so_far = audited.units["documents"]
    assert f"{so_far} documents, each at most once in a pass" in audited.verdict
    done = run_processes.paceline("resume", "killed", "--nproc", "3", "--quiet", timeout_s=200)
    assert done.returncode == 0, done.stderr
    one, killed = (RunDirectory(tmp_path / name) for name in ("one", "killed"))
    results = [run.read_result() or {} for run in (one, killed)]
    assert results[0]["model_sha256"] == results[1]["model_sha256"]
    audits = [audit(run) for run in (one, killed)]
    assert all(each.clean for each in audits)
    assert audits[0].units == audits[1].units
    assert audits[1].units["documents"] > so_far > 0
    assert 1 <= results[0]["steps"] / (20_000 / 64 / 12) < 1.3  # packs are not full
    records = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    logged = records[-1]["logged"]
    assert 0 < logged["padding"] < 0.5
    assert 0 < logged["mfu"] < 1
    assert logged["tokens_per_s"] > 0


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 1000])
def test_lines_belong_to_the_block_in_which_they_begin(tmp_path: Path, size: int) -> None:
    lines = [b"\xef\xbb\xbf{}", b"", b"[1]" * 9, b"x\r", b"", b"yy"]
    (tmp_path / "data.jsonl").write_bytes(b"\n".join(lines))
    stream = open_stream(tmp_path / "data.jsonl")
    [[file, total]] = stream._sizes.items()
    blocks = [(file, n, min(n + size, total)) for n in range(0, total, size)]
    read = [record for block in blocks for _, record in stream._records(type(stream.blocks(1)[0])(*block))]
    assert read == [line for line in lines if line]


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"stream:.*none.jsonl: FileNotFoundError"):
        open_stream(tmp_path / "none.jsonl")
    with pytest.raises(TaskError, match=r"there is no file, or it is empty"):
        open_stream(tmp_path / "*.jsonl")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "He sees."}\nnothing\n')
    with pytest.raises(DataError, match=r"bad.jsonl, the line at byte 21: this is not JSON"):
        epoch_of(open_stream(bad), 0, [0, 6])
    silent = open_stream(write_lines(tmp_path / "0.jsonl", [{"text": ""}] * 3))
    with pytest.raises(TaskError, match=r"none of the first documents has a token to learn"):
        _ = silent.mean_tokens
    parquet.write_table(pa.Table.from_pylist(RECORDS).slice(0, 0), tmp_path / "b-0.parquet")
    parquet.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "b-1.parquet")
    assert len(open_stream(tmp_path / "b-*.parquet").first_documents) == 256
    (tmp_path / "a.jsonl.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(TaskError, match=r"a.jsonl.gz is compressed, and cannot be read in parts"):
        open_stream(tmp_path / "a*")
    shorter = open_stream(write_lines(tmp_path / "c.jsonl", RECORDS))
    (tmp_path / "c.jsonl").write_bytes((tmp_path / "c.jsonl").read_bytes()[:-9])
    with pytest.raises(DataError, match=r"c.jsonl has become shorter"):
        epoch_of(shorter, 0, [0, 6])
    with pytest.raises(DataError, match=r"at byte 0: the tokenizer has token \d+, and the model's vocabulary 5 tokens"):
        epoch_of(open_stream(bad, vocabulary=5), 0, [0, 6])
