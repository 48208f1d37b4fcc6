"""The GPUs of ``device.cpp`` in this process: ``torch.cuda``, NCCL, and the waits of each step in a report.

Loaded by ``site/sitecustomize.py``. ``GPU_STAND_IN`` is a folder, with the built library and for the reports;
``GPU_STAND_IN_COUNT`` is how many GPUs the machine has, of which ``CUDA_VISIBLE_DEVICES`` chooses.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.util
import json
import os
import sys
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import torch
import torch.cuda
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

FOLDER = Path(os.environ["GPU_STAND_IN"])
MEMORY = 80 * 2**30
PATIENCE = timedelta(seconds=float(os.environ.get("GPU_STAND_IN_PATIENCE_S", "20")))
_GPUS = [str(number) for number in range(int(os.environ.get("GPU_STAND_IN_COUNT", "2")))]
VISIBLE = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(_GPUS)).split(",") if gpu in _GPUS]

# --- Waits: of the host for a device, and apart from them for messages through gloo ---

_WAITS = {"device": Counter(), "gloo": Counter()}
_PACKAGE = os.path.dirname(importlib.util.find_spec("paceline").origin) + os.sep


def _count(kind, cause):
    """Count a wait by the innermost line of Paceline that leads to it."""
    _find_steps()
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    where = "elsewhere"
    if frame is not None:
        file = frame.f_code.co_filename.removeprefix(_PACKAGE)
        where = f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
    _WAITS[kind][f"{where}: {cause}"] += 1


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _on_wait(cause):
    _count("device", cause.decode())


def _take_counts():
    counts = {kind: dict(counter) for kind, counter in _WAITS.items()}
    for counter in _WAITS.values():
        counter.clear()
    return counts


def _find_steps():
    """From the first step on, write a line for each, as soon as it has ended."""
    step = getattr(sys.modules.get("paceline.training.step"), "SyncStep", None)
    if step is None or hasattr(step.__init__, "__wrapped__"):
        return
    opened, group_context = step.__init__, sys.modules["paceline.training.group_context"].GroupContext
    commit, before = group_context.commit, {}

    @functools.wraps(opened)
    def counted(self, *args):
        before.update(_take_counts())
        opened(self, *args)

    @functools.wraps(commit)
    def committed(self, *args, **options):
        number = self._states.state.progress.step
        result = commit(self, *args, **options)
        run = str(self._run.directory.path.resolve())
        line = {"run": run, "rank": self.world.rank, "step": number, "before": before["device"], **_take_counts()}
        with (FOLDER / f"{os.getpid()}.waits").open("a") as report:
            report.write(json.dumps(line) + "\n")
        return result

    step.__init__, group_context.commit = counted, committed


# --- torch.cuda ---

_library = ctypes.CDLL(str(FOLDER / "device.so"))
_library.stand_in_seed.argtypes = [ctypes.c_int, ctypes.c_uint64]
_library.stand_in_resize.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_library.stand_in_wait.argtypes, _library.stand_in_wait.restype = [ctypes.c_char_p], ctypes.c_char_p
_library.stand_in_open(len(VISIBLE), _on_wait)
atexit.register(_library.stand_in_close)  # the interpreter cannot count any more

_used = _used_before_fork = False
_queued = []


def _after_fork():
    global _used, _used_before_fork
    _used_before_fork, _used = _used_before_fork or _used, False
    _take_counts()


os.register_at_fork(after_in_child=_after_fork)


def _initialize():
    global _used
    if _used_before_fork:
        raise RuntimeError(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
            "'spawn' start method (stand-in)"
        )
    if not VISIBLE:
        raise RuntimeError("No CUDA GPUs are available (stand-in)")
    _used = True
    while _queued:
        _queued.pop(0)()


def _index(device=None):
    """The number of a device; by default the current one."""
    _initialize()
    if isinstance(device, (str, torch.device)):
        device = torch.device(device).index
    index = _library.stand_in_current() if device is None else int(device)
    if index >= len(VISIBLE):
        raise RuntimeError(f"CUDA error: invalid device ordinal {index} (stand-in)")
    return index


def _exchange(device):
    before = _index()
    if device >= 0:
        _library.stand_in_set(_index(device))
    return before


def _seed_later(seed, devices):
    def seed_now():
        for index in devices():
            _library.stand_in_seed(index, seed & 2**64 - 1)

    if _used:
        seed_now()
    else:
        _queued.append(seed_now)


def _properties(device=None):
    index = _index(device)
    return SimpleNamespace(
        name="NVIDIA Stand-in",
        uuid=f"GPU-{VISIBLE[index]}",
        total_memory=MEMORY,
        major=9,
        minor=0,
        multi_processor_count=132,
    )


def _waits(cause):
    def wait(*arguments):
        error = _library.stand_in_wait(cause.encode())
        if error is not None:
            raise RuntimeError(error.decode())

    return wait


class _Event:
    def __init__(self, enable_timing=False, **options):
        self._at = None

    def record(self, stream=None):
        self._at = time.perf_counter()

    def elapsed_time(self, other):
        return (other._at - self._at) * 1e3

    def query(self):
        return True

    def wait(self, stream=None):
        pass

    synchronize = _waits("Event.synchronize")


class _Stream:
    def __init__(self, *arguments, **options):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        event = event or _Event()
        event.record()
        return event

    def query(self):
        return True

    synchronize = _waits("Stream.synchronize")


def _no_utilization(device=None):
    raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed (stand-in)")


_stream = _Stream()
_resize = torch.UntypedStorage.resize_


def _resize_storage(self, size):
    if self.device.type == "cuda":
        _library.stand_in_resize(self._cdata, int(size))
        return self
    return _resize(self, size)


for _name, _replacement in {
    "_lazy_init": _initialize,
    "init": _initialize,
    "is_initialized": lambda: _used,
    "_is_in_bad_fork": lambda: _used_before_fork,
    "is_available": lambda: bool(VISIBLE),
    "device_count": lambda: len(VISIBLE),
    "current_device": _index,
    "set_device": lambda device: _library.stand_in_set(_index(device)),
    "_exchange_device": _exchange,
    "_maybe_exchange_device": _exchange,
    "get_device_properties": _properties,
    "get_device_name": lambda device=None: _properties(device).name,
    "get_device_capability": lambda device=None: (9, 0),
    "is_bf16_supported": lambda including_emulation=True: True,
    "mem_get_info": lambda device=None: (MEMORY * 7 // 8, MEMORY) if _index(device) >= 0 else None,
    "memory_allocated": lambda device=None: 2**20,
    "max_memory_allocated": lambda device=None: 2**20,
    "reset_peak_memory_stats": lambda device=None: None,
    "empty_cache": lambda: None,
    "utilization": _no_utilization,
    "synchronize": _waits("synchronize"),
    "Event": _Event,
    "Stream": _Stream,
    "current_stream": lambda device=None: _stream,
    "default_stream": lambda device=None: _stream,
    "stream": lambda stream: nullcontext(),
    "manual_seed": lambda seed: _seed_later(seed, lambda: [_index()]),
    "manual_seed_all": lambda seed: _seed_later(seed, lambda: range(len(VISIBLE))),
    "get_rng_state": lambda device="cuda": torch.ops.stand_in.rng_state(_index(device)),
    "set_rng_state": lambda state, device="cuda": torch.ops.stand_in.set_rng_state(_index(device), state),
}.items():
    setattr(torch.cuda, _name, _replacement)
torch.UntypedStorage.resize_ = _resize_storage
torch.Tensor.record_stream = lambda self, stream: None
torch._C._cuda_clearCublasWorkspaces = lambda: None
torch.version.cuda = "13.0"
torch.cuda.nccl.version = lambda: (2, 28, 3)

# --- Groups: NCCL is a gloo of its own, whose messages have no tags and come in the order in which they are posted ---

_wait_for_gloo = dist.Work.wait


def _counted_wait(self, *arguments):
    if type(self) is dist.Work:
        _count("gloo", "Work.wait")
    return _wait_for_gloo(self, *arguments)


dist.Work.wait = _counted_wait


class _Communicator:
    """What NCCL knows of a group: how many operations it has begun, and the messages to and from each rank."""

    def __init__(self, store, name, rank):
        self.name, self._store, self._rank = name, store, rank
        self.collectives = 0
        self.sent, self.received = Counter(), Counter()
        self.in_flight = []

    def wait(self, work, what):
        """Wait for a message or a header; where it does not come, tell what each rank waits for."""
        self._store.set(f"waits/{self._rank}", what)
        try:
            _wait_for_gloo(work, PATIENCE)
        except RuntimeError as error:
            if "imed out" not in str(error) and "imeout" not in str(error):
                raise
            ranks = [
                f"rank {rank}: {self._store.get(f'waits/{rank}').decode()}"
                for rank in range(64)
                if self._store.check([f"waits/{rank}"])
            ]
            raise RuntimeError(
                f"NCCL would wait for ever in group {self.name} (stand-in): {what}; last waits: {'; '.join(ranks)}"
            ) from error


_communicators = {}


class ProcessGroupNCCL(dist.ProcessGroupGloo):
    """A second gloo, for tensors on devices."""

    class Options:
        """Options of torch's own, of which the stand-in uses two."""

        group_name = ""
        _timeout = None

        def __init__(self, **options):
            self.config = SimpleNamespace()

    def __init__(self, store, rank, size, options):
        super().__init__(store, rank, size, timeout=options._timeout)
        _communicators[options.group_name] = _Communicator(store, options.group_name, rank)

    def _group_start(self):
        pass

    def _group_end(self):
        pass


c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
c10d._NCCL_AVAILABLE = True


def _forgetting(leave):
    """Also drop what the communicators hold, as their works keep gloo's threads alive."""

    @functools.wraps(leave)
    def left(group=None):
        leave(group)
        if group is None:
            _communicators.clear()
            _Work.alive.clear()

    return left


dist.destroy_process_group = c10d.destroy_process_group = _forgetting(dist.destroy_process_group)
c10d._abort_process_group = _forgetting(c10d._abort_process_group)


class _Work(dist.Work):
    """An operation of a device, whose end the host awaits only as ``finish`` says."""

    alive: ClassVar[set[_Work]] = set()  # C++ holds its own part of a work only

    def __init__(self, finish):
        super().__init__()
        self._finish = finish
        self.alive.add(self)

    def wait(self, timeout=None):
        finish, self._finish = self._finish, None
        if finish is not None:
            self.alive.discard(self)
            finish()
        return True

    def is_completed(self):
        return self._finish is None

    def is_success(self):
        return True


def _host(value):
    if isinstance(value, torch.Tensor):
        return torch.ops.stand_in.host(value.detach()) if value.is_cuda else value
    return [_host(each) for each in value] if isinstance(value, list) else value


def _numbers(communicator, tensor):
    return torch.tensor(
        [communicator.collectives, tensor.numel(), tensor.element_size(), tensor.dtype.is_floating_point]
    )


def _describe(numbers):
    collectives, numel, size, floating = numbers.tolist()
    return (
        f"{numel} {'floating-point' if floating else 'integer'} values of {size} bytes after {collectives} collectives"
    )


def _group(argument):
    group = dist.ProcessGroup.unbox(argument)
    gloo = group._get_backend(torch.device("cuda"))
    return group, gloo, _communicators.get(group.group_name)


def _send(tensors, group, to, tag):
    _, gloo, communicator = _group(group)
    if communicator is None:
        raise RuntimeError("writev: Bad address: gloo sends from a tensor's address, which is a device's (stand-in)")
    number = communicator.sent[to]
    communicator.sent[to] += 1
    message = [_numbers(communicator, tensors[0])], [_host(tensors[0]).clone()]
    communicator.in_flight += [(gloo.send(part, to, 2 * number + i), part) for i, part in enumerate(message)]
    return _Work(lambda: None).boxed()


def _receive(tensors, group, source, tag):
    group, gloo, communicator = _group(group)
    if communicator is None:
        raise RuntimeError("readv: Bad address: gloo receives at a tensor's address, which is a device's (stand-in)")
    number = communicator.received[source]
    communicator.received[source] += 1
    expected, header = _numbers(communicator, tensors[0]), torch.zeros(4, dtype=torch.int64)
    coming = gloo.recv([header], source, 2 * number)

    def finish():
        communicator.wait(coming, f"message {number} from rank {source}")
        if not torch.equal(header, expected):
            raise RuntimeError(
                f"message {number} from rank {source} to rank {group.rank()} does not fit (stand-in): sent as "
                f"{_describe(header)}, received as {_describe(expected)}"
            )
        target = _host(tensors[0])
        into = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        _wait_for_gloo(gloo.recv([into], source, 2 * number + 1))
        if into is not target:
            target.copy_(into)

    return _Work(finish).boxed()


def _collective(name):
    operation = getattr(torch.ops.c10d, name).default
    returns = len(operation._schema.returns)
    at = next(i for i, argument in enumerate(operation._schema.arguments) if argument.name == "process_group")

    def run(*arguments):
        group, gloo, communicator = _group(arguments[at])
        twin = dist.ProcessGroup(dist.HashStore(), group.rank(), group.size())
        twin._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        check = None
        if communicator is not None:
            communicator.collectives += 1
            check = _compare(communicator, twin, name, arguments[0])
        result = operation(*(twin.boxed() if i == at else _host(each) for i, each in enumerate(arguments)))
        work = dist.Work.unbox(result if returns == 1 else result[1])

        def finish():
            if check is None:
                _count("gloo", f"Work.wait of {name}")
            else:
                check()
            _wait_for_gloo(work)

        made = _Work(finish).boxed()
        return made if returns == 1 else (arguments[0], made)

    return run


def _compare(communicator, twin, name, first):
    """Exchange what each rank believes that the operation is; return what compares them."""
    while isinstance(first, list):
        first = first[0]
    sides = sum(communicator.sent.values()), sum(communicator.received.values())
    total = first.numel() * (twin.size() if name in ("broadcast_", "allreduce_") else 1)
    mine = torch.tensor([sum(name.encode()), total, first.element_size(), communicator.collectives])
    everyone = [torch.empty_like(mine) for _ in range(twin.size())]
    gathering = twin.allgather([everyone], [mine])

    def check():
        communicator.wait(gathering, f"collective {communicator.collectives}, {name}, after {sides} messages")
        differing = {rank: each.tolist() for rank, each in enumerate(everyone) if not torch.equal(each, mine)}
        if differing and name not in (
            "gather_",
            "gather_into_tensor_",
            "scatter_",
            "allgather_",
            "alltoall_",
            "alltoall_base_",
        ):
            raise RuntimeError(f"ranks differ in {name}: {mine.tolist()} here, {differing} there (stand-in)")

    return check


def _has_group(name):
    schema = getattr(torch.ops.c10d, name).default._schema  # 2.14 has an operation without one
    return any(argument.name == "process_group" for argument in schema.arguments)


_c10d = torch.library.Library("c10d", "IMPL", "CUDA")
with warnings.catch_warnings(action="ignore"):  # these kernels replace torch's
    for _name in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        _operator = _name.removeprefix("c10d::")
        if _name != _operator != "recv_any_source_" and _has_group(_operator):
            _kernel = {"send": _send, "recv_": _receive}.get(_operator) or _collective(_operator)
            _c10d.impl(_operator, _kernel, "CUDA")
