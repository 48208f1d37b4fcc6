from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from paceline.core.errors import RunDirectoryError, RunDirectoryWriteError
from paceline.core.options import Shuffle
from paceline.data.ledger import Ledger, LedgerEntry, LedgerWriter, ledger_path, read_ledger
from paceline.data.order import DeterministicSampler

ORDER = DeterministicSampler(1000, 96, 12, seed=7, shuffle=Shuffle(16))


@contextmanager
def writing(
    directory: Path,
    generation: int = 0,
    parent: int | None = None,
    order: DeterministicSampler | None = ORDER,
) -> Iterator[LedgerWriter]:
    with closing(LedgerWriter(directory, order, generation=generation, parent_version=parent)) as writer:
        yield writer


def append(writer: LedgerWriter, version: int, ranks: int | list[int] = 2) -> None:
    step = version - 1
    writer.append(version=version, epoch=0, step=step, start=step * 96, stop=step * 96 + 96, ranks=ranks, checksum=5)


def versions(ledger: Ledger) -> list[tuple[int, bool]]:
    return [(entry.version, final) for entry, final in ledger.entries()]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    with writing(tmp_path / "ledger") as writer:
        append(writer, 1, ranks=3)
        append(writer, 2, ranks=[0, 5, 5])
    ledger = read_ledger(tmp_path / "ledger")
    assert ledger.order == ORDER
    assert [(f.generation, f.parent_version) for f in ledger.files] == [(0, None)]
    assert list(ledger.entries()) == [
        (LedgerEntry(1, 0, 0, 0, 96, 3, 5), True),
        (LedgerEntry(2, 0, 1, 96, 192, (0, 5, 5), 5), True),
    ]
    assert [entry.world_size for entry, _ in ledger.entries()] == [3, 3]


def test_the_format_is_the_documented_one(tmp_path: Path) -> None:
    with writing(tmp_path, generation=3, parent=17) as writer:
        append(writer, 18)
    assert (tmp_path / "gen-00003.jsonl").read_text() == (
        '{"format":1,"generation":3,"parent_version":17,"order":{"num_samples":1000,"global_batch_size":96,'
        '"num_microbatches":12,"seed":7,"min_microbatch_size":2,"shuffle":16}}\n'
        '{"v":18,"e":0,"t":17,"a":1632,"b":1728,"w":2,"c":5}\n'
    )


def test_entries_are_buffered_until_they_are_flushed(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        writer.flush(sync=False)
        append(writer, 1)
        assert versions(read_ledger(tmp_path)) == []
        writer.flush(sync=True)
        assert versions(read_ledger(tmp_path)) == [(1, True)]


def test_a_later_generation_cuts_what_it_did_not_continue_from(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        for version in (1, 2, 3, 4):
            append(writer, version)
    with writing(tmp_path, generation=1, parent=3) as writer:
        for version in (4, 5):
            append(writer, version)
    # Its parent is before generation 1: a damaged checkpoint made it go further back.
    with writing(tmp_path, generation=4, parent=2) as writer:
        append(writer, 3)
    assert versions(read_ledger(tmp_path)) == [
        (1, True),
        (2, True),
        (3, False),
        (4, False),
        (4, False),
        (5, False),
        (3, True),
    ]


def test_a_generation_that_began_from_nothing_cuts_everything(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        append(writer, 1)
    with writing(tmp_path, generation=1, parent=None) as writer:
        append(writer, 1)
    assert versions(read_ledger(tmp_path)) == [(1, False), (1, True)]


def test_a_stream_has_no_order(tmp_path: Path) -> None:
    with writing(tmp_path, order=None) as writer:
        append(writer, 1, ranks=[0, 99])
    assert read_ledger(tmp_path).order is None
    assert versions(read_ledger(tmp_path)) == [(1, True)]


@pytest.mark.parametrize("generation", [2, 1])
def test_no_generation_is_written_twice_or_after_a_later_one(tmp_path: Path, generation: int) -> None:
    with writing(tmp_path, generation=2, parent=5) as writer:
        append(writer, 6)
    before = ledger_path(tmp_path, 2).read_bytes()
    with pytest.raises(RunDirectoryError, match=r"gen-00002\.jsonl exists"):
        LedgerWriter(tmp_path, ORDER, generation=generation, parent_version=5)
    assert ledger_path(tmp_path, 2).read_bytes() == before
    assert not ledger_path(tmp_path, 1).exists()


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("a file in its place")
    with pytest.raises(RunDirectoryWriteError, match="cannot write the ledger"):
        LedgerWriter(tmp_path / "ledger", ORDER, generation=0, parent_version=None).flush(sync=True)


@pytest.mark.parametrize("torn", [b'{"v":3,"e":0,"t', b"\0" * 300, b'{"v":3,"e":0,"t":2,"a":192,"b":288,"w":2,"c":5}'])
def test_a_last_line_cut_short_is_left_out(tmp_path: Path, torn: bytes) -> None:
    with writing(tmp_path) as writer:
        append(writer, 1)
        append(writer, 2)
    with ledger_path(tmp_path, 0).open("ab") as file:
        file.write(torn)
    assert versions(read_ledger(tmp_path)) == [(1, True), (2, True)]


def test_a_header_cut_short_is_a_generation_without_steps(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        append(writer, 1)
    ledger_path(tmp_path, 1).write_bytes(b'{"format":1,"gen')
    assert versions(read_ledger(tmp_path)) == [(1, True)]


ENTRY = {"v": 2, "e": 0, "t": 1, "a": 96, "b": 192, "w": 2, "c": 5}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"not json", "not JSON"),
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        pytest.param(b"[" * 100_000, "not JSON", id="deep"),
        (b"[1, 2]", "expected an object"),
        (json.dumps({**ENTRY, "x": 1}).encode(), "with the keys v, e, t, a, b, w, c"),
        (json.dumps({k: v for k, v in ENTRY.items() if k != "c"}).encode(), "with the keys"),
        (json.dumps({**ENTRY, "v": -2}).encode(), "numbers of at least 0"),
        (json.dumps({**ENTRY, "c": "5"}).encode(), "numbers of at least 0"),
        (json.dumps({**ENTRY, "t": 1.5}).encode(), "numbers of at least 0"),
        (json.dumps({**ENTRY, "t": True}).encode(), "numbers of at least 0"),
        (json.dumps({**ENTRY, "b": 96}).encode(), "a must be below b"),
        (json.dumps({**ENTRY, "w": 0}).encode(), "w must be"),
        (json.dumps({**ENTRY, "w": []}).encode(), "w must be"),
        (json.dumps({**ENTRY, "w": [1, 2]}).encode(), "w must be"),
        (json.dumps({**ENTRY, "w": [0, 6, 3]}).encode(), "w must be"),
        (json.dumps({**ENTRY, "w": [0, 13]}).encode(), "w must be"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    with writing(tmp_path) as writer:
        append(writer, 1)
    with ledger_path(tmp_path, 0).open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(RunDirectoryError, match=message) as caught:
        versions(read_ledger(tmp_path))
    assert f"{ledger_path(tmp_path, 0)}, line 3" in str(caught.value)


HEADER = {
    "format": 1,
    "generation": 0,
    "parent_version": None,
    "order": {
        "num_samples": 1000,
        "global_batch_size": 96,
        "num_microbatches": 12,
        "seed": 7,
        "min_microbatch_size": 2,
        "shuffle": 1,
    },
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format must be 1"),
        ({"generation": 1}, "generation must be the file name's"),
        ({"parent_version": -1}, "parent_version must be"),
        ({"order": {"num_samples": 1000}}, "order must hold"),
        ({"order": {**HEADER["order"], "seed": "7"}}, "order must hold"),
        ({"order": {**HEADER["order"], "num_microbatches": 96}}, "order is impossible"),
    ],
)
def test_a_malformed_header_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    ledger_path(tmp_path, 0).write_text(json.dumps({**HEADER, **changes}) + "\n")
    with pytest.raises(RunDirectoryError, match=f"gen-00000.jsonl, line 1: {message}"):
        read_ledger(tmp_path)


def test_generations_of_different_runs_are_refused(tmp_path: Path) -> None:
    with writing(tmp_path):
        pass
    with writing(tmp_path, generation=1, order=DeterministicSampler(1000, 96, 12, seed=8)):
        pass
    with pytest.raises(RunDirectoryError, match=r"gen-00001\.jsonl, line 1: its order"):
        read_ledger(tmp_path)


def test_no_ledger_is_an_error(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RunDirectoryError, match="holds no ledger"):
            read_ledger(directory)


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "gen-00000.jsonl.swp").write_bytes(b"an editor's")
    with writing(tmp_path) as writer:
        append(writer, 1)
    assert versions(read_ledger(tmp_path)) == [(1, True)]


def test_flushes_from_another_thread_tear_nothing(tmp_path: Path) -> None:
    stop = threading.Event()
    with writing(tmp_path) as writer:

        def flush_again_and_again() -> None:
            while not stop.is_set():
                writer.flush(sync=False)

        thread = threading.Thread(target=flush_again_and_again)
        thread.start()
        try:
            for version in range(1, 20_001):
                append(writer, version)
        finally:
            stop.set()
            thread.join()
    assert versions(read_ledger(tmp_path)) == [(version, True) for version in range(1, 20_001)]


def test_what_a_close_has_lost_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on object stores and network disks, where the write succeeds and the close reports that it did not."""
    close, kept = os.close, [0]

    def losing_close(descriptor: int) -> None:
        is_ledger = ledger.exists() and os.path.sameopenfile(descriptor, reference.fileno())
        close(descriptor)
        if is_ledger and loses:
            os.truncate(ledger, kept[0])
            raise OSError(loses.pop(), "the disk quota is exceeded")

    ledger, loses = ledger_path(tmp_path, 0), []
    with writing(tmp_path) as writer:
        writer.flush(sync=True)
        kept[0] = ledger.stat().st_size
        with ledger.open("rb") as reference:
            monkeypatch.setattr(os, "close", losing_close)
            for version, failures in ((1, [errno.EDQUOT]), (2, [errno.EIO, errno.ENOSPC]), (3, [])):
                append(writer, version)
                loses += failures
                while loses:
                    with pytest.raises(RunDirectoryWriteError, match="the disk quota is exceeded"):
                        writer.flush(sync=version == 2)
                if version > 1:
                    writer.flush(sync=False)  # what was lost before is here again
                    kept[0] = ledger.stat().st_size
            loses.append(errno.EIO)
            append(writer, 4)
            with pytest.raises(RunDirectoryWriteError):
                writer.close()
            writer.flush(sync=False)
    assert versions(read_ledger(tmp_path)) == [(version, True) for version in range(1, 5)]


@pytest.mark.integration
def test_a_killed_writer_leaves_what_it_flushed(tmp_path: Path) -> None:
    program = """
        import os, signal, sys
        from pathlib import Path
        from paceline.data.ledger import LedgerWriter

        writer = LedgerWriter(Path(sys.argv[1]), None, generation=0, parent_version=None)
        for v in range(1, 5001):
            writer.append(version=v, epoch=0, step=v - 1, start=v, stop=v + 1, ranks=1, checksum=0)
            if v == 2500:
                writer.flush(sync=False)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    arguments = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    assert subprocess.run(arguments, timeout=60, check=False).returncode == -signal.SIGKILL
    read = [version for version, _ in versions(read_ledger(tmp_path))]
    assert read == list(range(1, len(read) + 1))
    assert 2500 <= len(read) < 5000
