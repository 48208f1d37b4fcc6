"""Map-style datasets: the same batches for any world size, number of workers, and place to start."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import resource
import select
import signal
import subprocess
import sys
import textwrap
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.processes import runs
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from paceline.core.errors import DataError
from paceline.core.options import Shuffle
from paceline.core.task import Task
from paceline.core.task_loading import load_task_class
from paceline.data.loader import EvalBatches, TensorLoader, auto_workers, build_loader, resolve_workers
from paceline.data.order import DeterministicSampler
from paceline.data.samples import Loader, MicroBatch, is_tensor_backed, to_device
from paceline.data.train_val_split import split_train_val
from paceline.data.workers import data_workers

pytestmark = pytest.mark.integration

CPU = torch.device("cpu")


def tensors(n: int) -> TensorDataset:
    """Sample k is (k, k % 7)."""
    return TensorDataset(torch.arange(n).float().unsqueeze(1), torch.arange(n) % 7)


class Squares(Dataset[Any]):
    """Sample k is (k squared, k), read one at a time."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, k: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([float(k * k)]), k


class Augmented(Squares):
    """Adds noise from the three generators that augmentation uses."""

    def __getitem__(self, k: int) -> tuple[torch.Tensor, int]:
        noise = [torch.rand(()).item(), random.random(), np.random.rand()]
        return torch.tensor([float(k), *noise], dtype=torch.float64), k


class Epochs(Squares):
    """Has an epoch of its own."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([1000 * self.epoch + index])


class Batched(Squares):
    """Counts the calls of PyTorch's batched convention."""

    calls = 0

    def __getitems__(self, numbers: list[int]) -> list[tuple[torch.Tensor, int]]:
        type(self).calls += 1
        return [self[k] for k in numbers]


class Faulty(Squares):
    """Sample 13 does as it is told."""

    def __init__(self, n: int, fault: str) -> None:
        super().__init__(n)
        self.fault = fault

    def __getitem__(self, k: int) -> tuple[torch.Tensor, int]:
        if k == 13 and self.fault == "raises":
            raise ValueError("no such picture")
        if k == 13 and self.fault == "ragged":
            return torch.zeros(2, 3), k
        if k == 13 and self.fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(k)


def loader_for(dataset: Any, order: DeterministicSampler, workers: int = 0, **options: Any) -> Loader:
    options.setdefault("collate", default_collate)
    return build_loader(dataset, order, seed=5, device=CPU, workers=workers, **options)


def shares(num_microbatches: int, world_size: int) -> list[range]:
    return [
        range(r * num_microbatches // world_size, (r + 1) * num_microbatches // world_size) for r in range(world_size)
    ]


def flat(micro_batches: list[MicroBatch]) -> list[tuple[Any, ...]]:
    """Micro-batches as comparable values."""
    return [(m.index, m.num_samples, m.checksum, [t.tolist() for t in m.batch]) for m in micro_batches]


@given(
    n=st.integers(2, 400),
    per_microbatch=st.integers(2, 9),
    extra=st.integers(0, 5),
    num_microbatches=st.integers(1, 6),
    world_size=st.integers(1, 6),
    block=st.sampled_from([0, 1, 5]),
)
def test_any_world_size_feeds_each_sample_once(
    n: int, per_microbatch: int, extra: int, num_microbatches: int, world_size: int, block: int
) -> None:
    order = DeterministicSampler(
        n, per_microbatch * num_microbatches + extra, num_microbatches, seed=3, shuffle=Shuffle(block)
    )
    ranks = [(loader_for(tensors(n), order), s) for s in shares(num_microbatches, min(world_size, num_microbatches))]
    seen: list[int] = []
    for step in range(order.steps_per_epoch):
        fetched = [m for loader, microbatches in ranks for m in loader.fetch(2, step, microbatches)]
        assert [m.index for m in fetched] == list(range(len(order.microbatch_bounds(step))))
        for m in fetched:
            numbers = order.microbatch_indices(2, step, m.index)
            assert m.batch[0][:, 0].tolist() == numbers.tolist()
            assert m.batch[1].tolist() == (numbers % 7).tolist()
            assert (m.num_samples, m.checksum) == (len(numbers), zlib.crc32(numbers.astype("<i8").tobytes()))
        seen += [int(x) for m in fetched for x in m.batch[0]]
    assert sorted(seen) == list(range(n))


@pytest.mark.parametrize("width", [1, 5, 7, 13, 16, 32, 33, 101])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8, torch.complex64])
def test_the_memory_of_a_micro_batch_is_aligned_as_new_memory(width: int, dtype: torch.dtype) -> None:
    dataset = TensorDataset(torch.zeros(100, width, dtype=dtype), torch.arange(100))
    order = DeterministicSampler(100, 36, 12, seed=1)
    for world_size in (1, 2, 3, 4):
        for microbatches in (*shares(12, world_size), *(range(r, 12, world_size) for r in range(world_size))):
            for step in range(order.steps_per_epoch):
                for m in loader_for(dataset, order).fetch(0, step, microbatches):
                    assert [t.data_ptr() % 64 for t in m.batch] == [0, 0], (width, dtype, world_size, m.index)
                    assert all(t.is_contiguous() for t in m.batch)


def test_a_loader_may_start_and_jump_anywhere() -> None:
    order = DeterministicSampler(50_000, 60, 3, seed=1)
    loader = loader_for(tensors(50_000), order)
    for epoch, step, microbatches in (
        (4, 700, range(3)),
        (0, 2, range(1, 3)),
        (0, 1, range(2)),
        (4, 833, range(3)),
    ):
        fetched = loader.fetch(epoch, step, microbatches)
        assert [m.batch[0][:, 0].tolist() for m in fetched] == [
            order.microbatch_indices(epoch, step, k).tolist()
            for k in microbatches
            if k < len(order.microbatch_bounds(step))
        ]


def test_a_rank_whose_microbatches_are_absent_gets_nothing() -> None:
    order = DeterministicSampler(12 + 4, 12, 6, seed=0)
    assert len(order.microbatch_bounds(1)) == 2
    assert loader_for(tensors(16), order).fetch(0, 1, range(3, 6)) == []
    with closing(loader_for(Squares(16), order)) as loader:
        assert loader.fetch(0, 1, range(3, 6)) == []
        assert [m.index for m in loader.fetch(1, 0, range(3, 6))] == [3, 4, 5]


def test_subsets_and_carved_splits_map_to_the_dataset() -> None:
    odd = Subset(Subset(tensors(400), range(0, 400, 2)), list(range(1, 200, 2)))  # 2, 6, 10, ...
    train, val = split_train_val(100, 0.2, seed=9)
    order = DeterministicSampler(len(train), 20, 2, seed=0)
    seen: list[int] = []
    loader = loader_for(odd, order, index_map=train)
    assert isinstance(loader, TensorLoader)
    with closing(loader_for(Subset(Squares(400), list(range(2, 400, 4))), order, index_map=train)) as by_sample:
        for step in range(order.steps_per_epoch):
            fetched, same = loader.fetch(0, step, range(2)), by_sample.fetch(0, step, range(2))
            assert [m.checksum for m in fetched] == [m.checksum for m in same]
            assert [m.batch[0][:, 0].tolist() for m in fetched] == [m.batch[1].tolist() for m in same]
            # The ledger's checksums are of numbers in the split: the audit knows of no carving.
            numbers = order.microbatch_indices(0, step, 0)
            assert fetched[0].checksum == zlib.crc32(numbers.astype("<i8").tobytes())
            seen += [int(x) for m in fetched for x in m.batch[0]]
    held_out = EvalBatches(odd, 7, seed=0, device=CPU, workers=0, collate=default_collate, index_map=val)
    seen += [int(x) for m in held_out.read(range(held_out.num_batches)) for x in m.batch[0]]
    assert sorted(seen) == list(range(2, 400, 4))


def test_what_counts_as_tensors() -> None:
    class OwnItems(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(index)[0]

    class OwnCollate(Task):
        def collate(self, samples: list[Any]) -> Any:
            return samples

    assert is_tensor_backed(tensors(4), Task().collate)
    assert is_tensor_backed(Subset(tensors(4), [1]), default_collate)
    assert not is_tensor_backed(tensors(4), OwnCollate().collate)
    assert not is_tensor_backed(OwnItems(torch.zeros(4)), default_collate)
    assert not is_tensor_backed(Squares(4), default_collate)
    assert resolve_workers(tensors(4), default_collate, 3, 1) == 0
    assert resolve_workers(Subset([(torch.zeros(1), 0)] * 4, [1, 2]), default_collate, "auto", 1) == 0
    assert resolve_workers([(torch.zeros(1), 0)] * 4, default_collate, 3, 1) == 3


def test_auto_workers_share_the_cpus(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    with caplog.at_level(logging.WARNING):
        assert [auto_workers("auto", ranks) for ranks in (1, 2, 8)] == [4, 3, 1]
        assert [auto_workers(2, 3), auto_workers(0, 64)] == [2, 0]
        assert not caplog.records
        assert auto_workers(4, 2) == 4
    assert "8 processes on 6 CPUs" in caplog.text


@pytest.fixture(scope="module")
def reference() -> list[list[tuple[Any, ...]]]:
    """Two epochs of augmented samples, by one process without workers."""
    with closing(loader_for(Augmented(46), AUGMENTED_ORDER)) as loader:
        return [flat(loader.fetch(e, t, range(3))) for e in range(2) for t in range(AUGMENTED_ORDER.steps_per_epoch)]


AUGMENTED_ORDER = DeterministicSampler(46, 13, 3, seed=2)


def test_augmentation_is_keyed_by_epoch_and_sample(reference: list[list[tuple[Any, ...]]]) -> None:
    noise = [tuple(row[1:]) for step in reference for m in step for row in m[3][0]]
    assert len({value for row in noise for value in row}) == 3 * 2 * 46
    # Other micro-batches and another batch size: the same samples.
    with closing(loader_for(Augmented(46), DeterministicSampler(46, 23, 1, seed=8))) as loader:
        other = {tuple(row) for t in range(2) for m in loader.fetch(1, t, range(1)) for row in m.batch[0].tolist()}
    assert other == {tuple(row) for step in reference[4:] for m in step for row in m[3][0]}


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(reference: list[list[tuple[Any, ...]]], workers: int) -> None:
    steps = AUGMENTED_ORDER.steps_per_epoch
    with closing(loader_for(Augmented(46), AUGMENTED_ORDER, workers)) as loader:
        assert [flat(loader.fetch(e, t, range(3))) for e in range(2) for t in range(steps)] == reference
        # Back to an earlier step, and on with other micro-batches, as after a fault.
        assert flat(loader.fetch(0, 2, range(3))) == reference[2]
        assert flat(loader.fetch(0, 3, range(1, 2))) == reference[3][1:2]
        assert flat(loader.fetch(1, 0, range(1, 2))) == reference[steps][1:2]
        # What a trainer leaves behind that is killed now: its semaphores have no names any more.
        opened = {each.path for pid in data_workers() for each in psutil.Process(pid).memory_maps()}
        semaphores = [path for path in opened if path.startswith("/dev/shm/sem.")]
        assert semaphores
        assert not [path for path in semaphores if Path(path).exists()]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_is_told_the_epoch_of_its_samples(workers: int) -> None:
    dataset = Epochs(8)
    order = DeterministicSampler(8, 4, 1, seed=0)
    held_out = EvalBatches(dataset, 4, seed=0, device=CPU, workers=workers, collate=default_collate)
    with closing(loader_for(ConcatDataset([dataset]), order, workers)) as loader, closing(held_out):
        for epoch, step in ((0, 0), (0, 1), (1, 0), (1, 1), (5, 1)):
            (batch,) = loader.fetch(epoch, step, range(1))
            assert (batch.batch // 1000).flatten().tolist() == [epoch] * 4
            assert {int(x) // 1000 for batch in held_out.read([1]) for x in batch.batch} == {0}


def test_reading_here_leaves_the_trainers_generators_alone() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = torch.rand(3).tolist(), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    with closing(loader_for(Augmented(20), DeterministicSampler(20, 10, 2, seed=0))) as loader:
        loader.fetch(0, 0, range(2))
    with closing(loader_for(Augmented(20), DeterministicSampler(20, 10, 2, seed=0), workers=1)) as loader:
        loader.fetch(0, 0, range(2))
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == expected


def test_datasets_that_read_batches_are_asked_for_batches() -> None:
    Batched.calls = 0
    order = DeterministicSampler(20, 10, 2, seed=0)
    with closing(loader_for(Batched(20), order)) as loader:
        fetched = loader.fetch(0, 0, range(2))
    assert Batched.calls == 2
    assert [m.batch[1].tolist() for m in fetched] == [order.microbatch_indices(0, 0, k).tolist() for k in range(2)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raises", r"^train dataset, sample 13 cannot be read: ValueError: no such picture$"),
        ("ragged", r"different shapes: sample 13 has \(\(2, 3\), int\); samples .* have \(\(1,\), int\)"),
    ],
)
def test_a_bad_sample_is_named(fault: str, message: str, workers: int) -> None:
    order = DeterministicSampler(20, 20, 1, seed=0)
    with (
        closing(loader_for(Faulty(20, fault), order, workers)) as loader,
        pytest.raises(DataError, match=message) as caught,
    ):
        loader.fetch(0, 0, range(1))
    assert "Traceback" in str(caught.value.__cause__)
    assert not hasattr(caught.value, "__notes__")  # they would be told with the message


def test_a_dataset_of_a_notebooks_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", cell)
    exec(
        "class Items:\n    def __len__(self): return 20\n    def __getitem__(self, k): return k\n"
        "def collate(samples): return samples\n",
        cell.__dict__,
    )
    order = DeterministicSampler(20, 20, 1, seed=0)
    assert resolve_workers(cell.Items(), default_collate, "auto", 1) == 0
    assert resolve_workers(Squares(20), cell.collate, "auto", 1) == 0
    assert resolve_workers(cell.Items(), default_collate, 1, 1) == 1
    message = r"^Items, which the train dataset needs, was defined in a notebook's cell"
    with closing(loader_for(cell.Items(), order, 1)) as loader, pytest.raises(DataError, match=message):
        loader.fetch(0, 0, range(1))


def test_a_dead_worker_is_reported() -> None:
    loader = loader_for(Faulty(20, "dies"), DeterministicSampler(20, 20, 1, seed=0), workers=1)
    message = r"worker process of the train dataset died; samples \d+ \.\.\. \d+"
    with closing(loader), pytest.raises(DataError, match=message):
        loader.fetch(0, 0, range(1))


class Dying(Squares):
    """A worker that reads one of these samples is killed, the first time."""

    def __init__(self, n: int, samples: tuple[int, ...], folder: Path) -> None:
        super().__init__(n)
        self.samples, self.folder = samples, folder

    def __getitem__(self, k: int) -> tuple[torch.Tensor, int]:
        if k in self.samples:
            with contextlib.suppress(FileExistsError), (self.folder / f"died-{k}").open("x"):
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(k)[0] + torch.rand(1), k


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_workers_are_replaced_and_no_batch_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, workers: int
) -> None:
    order = DeterministicSampler(20, 4, 2, seed=0)
    alone, dying = Dying(20, (), tmp_path), Dying(20, (3,), tmp_path)
    with closing(loader_for(alone, order)) as first, closing(loader_for(dying, order, workers)) as second:
        for epoch in range(2):
            if epoch == 1:
                os.kill(data_workers()[0], signal.SIGKILL)
            for step in range(5):
                expected, found = (loader.fetch(epoch, step, range(2)) for loader in (first, second))
                for one, other in zip(expected, found, strict=True):
                    assert one.checksum == other.checksum
                    assert all(map(torch.equal, one.batch, other.batch))
    assert (tmp_path / "died-3").exists()
    assert caplog.text.count("a worker process of the train dataset was killed") == 2


class Drawing(Squares):
    """Sample k is a draw from the dataset's own generator."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.generator = torch.Generator().manual_seed(7)

    def __getitem__(self, k: int) -> tuple[torch.Tensor, int]:
        return torch.randn(1, generator=self.generator), k


def test_a_dataset_with_a_generator_travels_to_its_worker_with_the_generators_state() -> None:
    dataset = Drawing(20)
    dataset[0]
    expected = torch.Generator()
    expected.set_state(dataset.generator.get_state())
    order = DeterministicSampler(20, 20, 1, seed=0)
    with closing(loader_for(dataset, order, workers=1)) as loader:
        (micro_batch,) = loader.fetch(0, 0, range(1))
    draws = torch.stack([torch.randn(1, generator=expected) for _ in range(20)])
    assert torch.equal(micro_batch.batch[0], draws)


class Unreadable(Squares):
    """Can be pickled, and cannot be rebuilt."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise ValueError("cannot be rebuilt")


def test_a_worker_that_cannot_rebuild_its_dataset_says_so() -> None:
    loader = loader_for(Unreadable(20), DeterministicSampler(20, 20, 1, seed=0), workers=1)
    with closing(loader), pytest.raises(DataError, match="A dataset that cannot be pickled, or"):
        loader.fetch(0, 0, range(1))


def test_a_dataset_that_cannot_travel_is_refused() -> None:
    dataset = Squares(20)
    dataset.transform = lambda x: x  # type: ignore[attr-defined]
    loader = loader_for(dataset, DeterministicSampler(20, 20, 1, seed=0), workers=1)
    with closing(loader), pytest.raises(DataError, match=r"cannot be sent to worker processes.*--num-workers 0"):
        loader.fetch(0, 0, range(1))


def with_lock(samples: list[Any]) -> Any:
    return [*default_collate(samples), threading.Lock()]


def with_gradients(samples: list[Any]) -> Any:
    squares, numbers = default_collate(samples)
    return [squares.requires_grad_() * 2, numbers]


@pytest.mark.parametrize(
    ("collate", "error"), [(with_lock, "cannot pickle '_thread.lock' object"), (with_gradients, "requires_grad")]
)
def test_a_batch_that_cannot_be_sent_is_told_and_not_waited_for(collate: Any, error: str) -> None:
    loader = loader_for(Squares(20), DeterministicSampler(20, 20, 1, seed=0), workers=1, collate=collate)
    message = rf"^train dataset, samples \d+ \.\.\. \d+ .* cannot be sent by a data worker: .*{error}.*--num-workers 0"
    with closing(loader), pytest.raises(DataError, match=message) as caught:
        loader.fetch(0, 0, range(1))
    assert "Traceback" in str(caught.value.__cause__)


class Pieces(Squares):
    """Sample k is 40 tensors."""

    def __getitem__(self, k: int) -> Any:
        return [torch.tensor([float(k + piece)]) for piece in range(40)]


def as_they_are(samples: list[Any]) -> Any:
    return samples


def test_batches_may_have_more_tensors_than_the_shell_allows_open_files() -> None:
    order = DeterministicSampler(40, 10, 1, seed=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 200, hard))
    try:
        with closing(loader_for(Pieces(40), order, workers=1, collate=as_they_are)) as loader:
            (micro_batch,) = loader.fetch(0, 0, range(1))
        assert [len(sample) for sample in micro_batch.batch] == [40] * 10
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


FEW_FILES = """
    import os, resource, sys, torch
    from paceline.core.errors import DataError
    from paceline.data.loader import build_loader
    from paceline.data.order import DeterministicSampler

    class Items:
        def __len__(self): return 400
        def __getitem__(self, k): return [torch.tensor([k]) for _ in range(25)]

    def as_they_are(samples): return samples

    def try_to_load(samples, fill=lambda: None):
        loader = build_loader(Items(), DeterministicSampler(400, samples, 1, seed=0, min_microbatch_size=1),
                              seed=0, workers=1, device=torch.device("cpu"), collate=as_they_are)
        try:
            for step in range(9):
                loader.fetch(0, step, range(1))
                fill()
        except DataError as error:
            print(error)
        loader.close()

    def fill():
        try:
            while True: others.append(open(os.devnull))
        except OSError:
            del others[-20:]

    if __name__ == "__main__":
        resource.setrlimit(resource.RLIMIT_NOFILE, (150, 150))
        others = []
        try_to_load(10)  # more than the worker may open
        try_to_load(1, fill)  # more than the trainer may
"""


def test_a_limit_on_open_files_is_told(tmp_path: Path, run_processes: Any) -> None:
    script = tmp_path / "few_files.py"
    script.write_text(textwrap.dedent(FEW_FILES))
    output, _ = run_processes.start([sys.executable, script]).communicate(timeout=60)
    sent, received = [line for line in output.splitlines() if line.startswith("train dataset")]
    assert "cannot be sent by a data worker" in sent
    assert "did not arrive from their data worker" in received
    for line in (sent, received):
        assert "a process may have 150 (ulimit -Hn)" in line


def test_no_map_style_dataset_is_refused() -> None:
    class Endless(Dataset[Any]):
        def __getitem__(self, k: int) -> int:
            return k

    order = DeterministicSampler(20, 20, 1, seed=0)
    with pytest.raises(DataError, match="Endless, which has no length"):
        loader_for(Endless(), order)
    with pytest.raises(DataError, match="generator, which has no __getitem__"):
        loader_for((k for k in range(20)), order)
    with pytest.raises(DataError, match="has 21 samples, but this run was created with 20"):
        loader_for(tensors(21), order)


@pytest.mark.parametrize("make", [tensors, Squares])
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_blocks_are_the_same_for_any_world_size(make: Any, workers: int) -> None:
    options = {"seed": 0, "device": CPU, "workers": workers, "collate": default_collate}
    with closing(EvalBatches(make(45), 8, **options)) as whole:
        assert (whole.num_samples, whole.num_batches) == (45, 6)
        expected = flat(list(whole.read(range(6))))
        assert [value[:2] for value in expected] == [(b, 8) for b in range(5)] + [(5, 5)]
        # Again, by three ranks, one after another in the same workers.
        assert [v for s in shares(6, 3) for v in flat(list(whole.read(s)))] == expected
        assert list(whole.read(range(0))) == []


TASK_FILE = """
    from dataclasses import dataclass
    import torch
    from paceline.core.task import Task

    class Items:
        def __len__(self): return 12
        def __getitem__(self, k): return torch.tensor(k)

    @dataclass
    class Counting(Task):
        offset: int = 100
        def collate(self, samples): return [torch.stack(samples) + self.offset]
"""


def test_a_task_from_a_file_is_known_to_its_workers(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    gone, file = tmp_path / "gone" / "other.py", tmp_path / "counting.py"
    for each in (gone, file):
        each.write_text(textwrap.dedent(TASK_FILE))
    other_class, task_class = load_task_class(f"{gone}:Counting"), load_task_class(f"{file}:Counting")
    gone.unlink()  # an earlier task of this process, which the worker does not need
    try:
        task = task_class()
        items = sys.modules[task_class.__module__].Items()
        order = DeterministicSampler(12, 12, 1, seed=0)
        with closing(loader_for(items, order, workers=1, collate=task.collate)) as loader:
            (micro_batch,) = loader.fetch(0, 0, range(1))
        assert sorted(micro_batch.batch[0].tolist()) == list(range(100, 112))
    finally:
        for each, loaded in ((gone, other_class), (file, task_class)):
            del sys.modules[loaded.__module__]
            sys.path.remove(str(each.parent))


ORPHANS = """
    import os, signal, sys, torch
    from torch.utils.data import default_collate
    from paceline.data.loader import build_loader
    from paceline.data.order import DeterministicSampler

    class Items:
        def __len__(self): return 20
        def __getitem__(self, k): return os.getpid()

    if __name__ == "__main__":
        loader = build_loader(Items(), DeterministicSampler(20, 20, 2, seed=0), seed=0, device=torch.device("cpu"),
                              workers=2, collate=default_collate)
        pids = {pid for m in loader.fetch(0, 0, range(2)) for pid in m.batch.tolist()}
        servers = {int(open(f"/proc/{pid}/stat").read().split()[3]) for pid in pids}
        assert os.getpid() not in servers
        print(*pids, *servers, flush=True)
        for pid in pids | servers:
            os.kill(pid, signal.SIGTERM)  # a scheduler does that; batches must go on
        for step in range(1, 12):
            loader.fetch(step, 0, range(2))
        assert all(open(f"/proc/{pid}/stat").read().split()[2] != "Z" for pid in pids | servers)
        print("still loading", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_outlive_sigterm_but_not_their_trainer(tmp_path: Path) -> None:
    script = tmp_path / "orphans.py"
    script.write_text(textwrap.dedent(ORPHANS))
    trainer = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    others: list[int] = []
    try:
        others = [os.pidfd_open(int(pid)) for pid in trainer.stdout.readline().split()]
        output, _ = trainer.communicate(timeout=60)
        assert "still loading" in output
        assert trainer.returncode == -signal.SIGKILL
        assert len(others) == 3
        for process in others:
            # Readable once the process has ended.
            assert select.select([process], [], [], 60)[0], "a worker or its server outlives the trainer"
    finally:
        trainer.kill()
        trainer.wait()
        for process in others:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            os.close(process)


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


def test_moving_keeps_the_structure_of_a_batch() -> None:
    batch = {
        "pair": Pair(torch.ones(2), "a"),
        "list": [torch.zeros(1), 3],
        "tuple": (torch.ones(1),),
        "none": None,
    }
    moved = to_device(batch, torch.device("meta"))
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].name == "a"
    assert [moved["pair"].x.device.type, moved["list"][0].device.type, moved["tuple"][0].device.type] == ["meta"] * 3
    assert (moved["list"][1], moved["none"], type(moved["tuple"])) == (3, None, tuple)
    assert to_device(batch, CPU) is batch


@pytest.fixture(autouse=True)
def _importable_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import this file by the name that pytest gave it, to find its datasets."""
    root = Path(__file__).parents[__name__.count(".")]
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])


@pytest.fixture(autouse=True)
def _generators_restored() -> Iterator[None]:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(states[0]), random.setstate(states[1]), np.random.set_state(states[2])


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "workers"), [(tensors, 0), (Squares, 0), (Squares, 1)])
@pytest.mark.parametrize("fits", [True, False])
def test_a_gpu_gets_the_same(make: Any, workers: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fits:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    order, gpu = DeterministicSampler(50, 12, 3, seed=0), torch.device("cuda", 0)
    options: dict[str, Any] = {"seed": 5, "workers": workers, "collate": default_collate}
    with (
        closing(build_loader(make(50), order, device=gpu, **options)) as loader,
        closing(loader_for(make(50), order)) as expected,
    ):
        for step in range(order.steps_per_epoch):
            fetched = loader.fetch(0, step, range(3))
            assert all(t.device == gpu for m in fetched for t in m.batch)
            assert flat(fetched) == flat(expected.fetch(0, step, range(3)))


EARLY = """
    import os, signal, time, torch
    from torch.utils.data import default_collate
    from paceline.data.loader import build_loader
    from paceline.data.order import DeterministicSampler

    class Items:
        def __len__(self): return 20
        def __getitem__(self, k): return k
        def __getstate__(self): return {"trainer": os.getpid()}
        def __setstate__(self, state):
            print(os.getpid(), os.getppid(), flush=True)
            os.kill(state["trainer"], signal.SIGKILL)
            while os.path.exists(f"/proc/{state['trainer']}"):
                time.sleep(0.01)

    if __name__ == "__main__":
        build_loader(Items(), DeterministicSampler(20, 20, 2, seed=0), seed=0, device=torch.device("cpu"),
                     workers=1, collate=default_collate).fetch(0, 0, range(2))
"""


def test_a_worker_ends_whose_trainer_is_killed_before_it_has_started(
    tmp_path: Path, run_processes: Any, wait_until: Callable[..., None]
) -> None:
    script = tmp_path / "early.py"
    script.write_text(textwrap.dedent(EARLY))
    trainer = run_processes.start([sys.executable, script])
    worker, server = map(int, trainer.stdout.readline().split())
    assert trainer.wait(60) == -signal.SIGKILL
    try:
        wait_until(lambda: not (runs(worker) or runs(server)), "the end of the worker and its server")
    finally:
        for pid in (worker, server):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
