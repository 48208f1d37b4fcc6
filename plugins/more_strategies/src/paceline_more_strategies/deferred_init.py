"""Deferred initialisation: a model is built without its large tensors, whose values are computed one by one later.

While a model is built, each operation with a large tensor is recorded instead of computed, in the way of torchdistx's
``deferred_init``. Draws from a random generator are made and dropped, so that all that follows them has the same
random numbers. To compute a tensor, the operations that led to it are repeated, with the generator's states of then: it
has the bits that it would have had.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import PacelineError
from paceline.parallel.fsdp import Fill
from paceline.parallel.sharded_state import distributed_part, is_distributed, shard_of
from paceline.parallel.world import World
from paceline.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    buffer_table,
    map_tensors,
    parameter_table,
    tree_leaves,
    tree_map,
    tree_map_only,
)

_log = logging.getLogger(__name__)

LARGE_BYTES = 2**20
"""A tensor of fewer bytes is not deferred."""

_FILLS = {"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "bernoulli_", "exponential_", "log_normal_"}
"""Operations after which a tensor no longer depends on what it held."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h

_COPIES = {"_to_copy", "clone", "copy_"}


class _SharedFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors whose deep copies belong to the same mode."""

    def __deepcopy__(self, memo: object) -> _SharedFakeMode:
        return self


@dataclass(frozen=True)
class _View:
    """A place in a storage that is not there yet."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


@dataclass
class _Operation:
    """A recorded call.

    Attributes:
        args, kwargs: with a :class:`_View` for each deferred tensor; other tensors do not change any more.
        outputs: the tensors that it returned in new storages, by their number among its outputs.
        writes: the storages that it changes or makes.
        reads: the storages on whose content it depends.
        fills: whether the one storage that it changes has no earlier content afterwards.
        draws: the state of the generator before it, if it is random.
    """

    call: Any
    args: Any
    kwargs: Any
    writes: set[int]
    reads: set[int]
    fills: bool
    outputs: dict[int, _View] = field(default_factory=dict)
    draws: Tensor | None = None


class DeferredInit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what is done with large tensors while it is active; those are fake tensors meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake_mode = _SharedFakeMode(allow_non_fake_inputs=True)
        self._operations: list[_Operation] = []
        self._writers: dict[int, list[int]] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._storages: dict[int, Any] = {}  # keeps them alive, so that none gets the address of another

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
            if is_view or any(tensor.device.type != "cpu" for tensor in tensors):
                return func(*args, **kwargs)
            if tensors and all(tensor.nbytes < LARGE_BYTES for tensor in tensors):
                return func(*args, **kwargs)
        changed = _changed(func, args, kwargs)
        if any(not isinstance(tensor, FakeTensor) for tensor in changed):
            return self._compute(func, args, kwargs)
        with self._fake_mode:
            try:
                made = func(*args, **kwargs)
            except PacelineError:
                raise
            except Exception:  # it depends on values
                made = None
        # A module that changes its dtype swaps its parameters, which have no weak references then.
        self._fake_mode.fake_tensor_converter.tensor_memo.clear()
        outputs = [leaf for leaf in tree_leaves(made) if leaf is not None]
        if not outputs or not all(isinstance(output, Tensor) for output in outputs):
            return self._compute(func, args, kwargs)
        is_small = all(output.nbytes < LARGE_BYTES for output in outputs)
        if any(output.device.type != "cpu" for output in outputs):
            return self._compute(func, args, kwargs)
        if is_small and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **kwargs)
        self._record(func, args, kwargs, changed, outputs)
        return made

    def _record(self, func: Any, args: Any, kwargs: Any, changed: list[Any], outputs: list[Any]) -> None:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        known = {self._key(tensor) for tensor in inputs}
        new = {i: self.view(output) for i, output in enumerate(outputs) if self._key(output) not in known}
        writes = {self._key(tensor) for tensor in changed} | {view.storage for view in new.values()}
        if not writes:  # a view
            return
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        fills = (
            len(changed) == 1
            and func._schema.name.removeprefix("aten::") in _FILLS
            and changed[0].nbytes == changed[0].untyped_storage().nbytes()
        )
        reads = {self._key(tensor) for tensor in inputs if not (fills and tensor is changed[0])}
        operation = _Operation(
            func,
            tree_map_only(Tensor, self._argument, args),
            tree_map_only(Tensor, self._argument, kwargs),
            writes,
            reads,
            fills and not reads & writes,
            new,
        )
        if is_random:
            generator = kwargs.get("generator") or torch.default_generator
            operation.draws = generator.get_state()
            func(*tree_map_only(FakeTensor, self._scratch if fills else self.compute, args), **kwargs)
        for key in writes:
            self._writers.setdefault(key, []).append(len(self._operations))
        self._operations.append(operation)

    def _scratch(self, fake: Any) -> Tensor:
        """Return a place for values that are not read: always the same memory, which would else be fragmented."""
        if len(self._buffer) < fake.untyped_storage().nbytes():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # before it is larger
            self._buffer = torch.empty(fake.untyped_storage().nbytes(), dtype=torch.uint8)
        return self.view(fake).of(self._buffer.untyped_storage())

    def _key(self, tensor: Any) -> int:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        self._storages.setdefault(key, storage)
        return key

    def view(self, tensor: Any) -> _View:
        return _View(self._key(tensor), tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _argument(self, tensor: Tensor) -> Any:
        if isinstance(tensor, FakeTensor):
            return self.view(tensor)
        return tensor.detach() if is_mapped(tensor) else tensor.detach().clone()

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call an operation that needs values, or whose result is not deferred."""
        return func(*tree_map_only(FakeTensor, self.compute, args), **tree_map_only(FakeTensor, self.compute, kwargs))

    # --- The values

    def compute(self, fake: Any) -> Tensor:
        """Compute a deferred tensor, in memory of its own."""
        return self.compute_view(self.view(fake))

    def compute_view(self, view: _View) -> Tensor:
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad(), _without_modes():
            for number in sorted(self._needed(view.storage)):
                self._repeat(self._operations[number], storages)
            return view.of(storages[view.storage])

    def source(self, view: _View) -> Tensor | None:
        """Return the tensor in a file of which a deferred tensor is a copy, perhaps in another dtype; else None."""
        last = self._operations[self._writers[view.storage][-1]]
        if last.call._schema.name.removeprefix("aten::") not in _COPIES or not (last.fills or last.outputs):
            return None
        is_whole = view in last.outputs.values() or view == last.args[0]
        copied = last.args[1 if last.fills else 0]
        if is_whole and isinstance(copied, Tensor) and copied.shape == view.size and is_mapped(copied):
            return copied
        return None

    def _needed(self, storage: int) -> set[int]:
        """Return the numbers of the operations on which a storage's content depends."""
        needed: set[int] = set()
        waiting = [(storage, len(self._operations))]
        while waiting:
            key, before = waiting.pop()
            for number in reversed(self._writers[key]):
                if number >= before:
                    continue
                if number in needed:
                    break
                needed.add(number)
                operation = self._operations[number]
                waiting += [(read, number) for read in operation.reads if read != key]
                if operation.fills:
                    break
        return needed

    def _repeat(self, operation: _Operation, storages: dict[int, torch.UntypedStorage]) -> None:
        def real(leaf: Any) -> Any:
            if not isinstance(leaf, _View):
                return leaf
            if leaf.storage not in storages:  # the operation fills it
                storages[leaf.storage] = torch.UntypedStorage(self._storages[leaf.storage].nbytes())  # type: ignore[no-untyped-call]
            return leaf.of(storages[leaf.storage])

        args, kwargs = tree_map(real, operation.args), tree_map(real, operation.kwargs)
        if operation.draws is None:
            made = operation.call(*args, **kwargs)
        else:
            generator = kwargs.get("generator") or torch.default_generator
            now = generator.get_state()
            generator.set_state(operation.draws)
            made = operation.call(*args, **kwargs)
            generator.set_state(now)
        outputs = [leaf for leaf in tree_leaves(made) if leaf is not None]
        for number, view in operation.outputs.items():
            output = outputs[number]
            if (output.size(), output.stride(), output.storage_offset()) != (view.size, view.stride, view.offset):
                output = torch.empty_strided(view.size, view.stride, dtype=view.dtype).copy_(output)
            storages[view.storage] = output.untyped_storage()

    def require_none_left(self) -> None:
        """Require that nothing refers to a deferred tensor any more.

        Raises:
            RuntimeError: something does, such as an attribute of the model.
        """
        self._buffer = torch.empty(0, dtype=torch.uint8)
        gc.collect()
        left = [made for made in gc.get_objects() if type(made) is FakeTensor and made.fake_mode is self._fake_mode]
        if left:
            raise RuntimeError(f"the model keeps a tensor of shape {tuple(left[0].shape)} outside of its parameters")


def _changed(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the tensors that a call changes in place."""
    changed = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            changed += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return changed


@contextmanager
def _without_modes() -> Iterator[None]:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def is_mapped(tensor: Tensor) -> bool:
    """Return whether a large tensor's memory is a file's, as that of safetensors; False where that is not known."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.nbytes < LARGE_BYTES or tensor.device.type != "cpu":
        return False
    address = tensor.data_ptr()
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                words = line.split()
                start, _, stop = words[0].partition("-")
                if int(start, 16) <= address < int(stop, 16):
                    return len(words) > 5 and words[5].startswith("/")
    except OSError:
        pass
    return False


# --- A model whose large parameters and buffers have no values yet ---


@dataclass(frozen=True)
class LateTensor:
    """The values of a large parameter or buffer.

    Attributes:
        source: the tensor in a file of which it is a copy, perhaps in another dtype; None if it has another origin.
    """

    compute: Callable[[], Tensor]
    source: Tensor | None


def build_late(build: Callable[[], nn.Module], world: World, *, offloads: bool) -> tuple[nn.Module, Fill]:
    """Build a model whose large parameters and buffers get their values once it is sharded; a collective.

    Args:
        build: builds it, with equal values each time.
        offloads: keep the shards on the CPU.

    Returns:
        The model, and what gives it the values.
    """
    module, late = build_deferred(build)
    if any(names != [*late] for names in world.all_gather_object([*late])):
        module, late = build(), {}
    if late:
        return_freed_memory()
    return module, partial(_fill, late, world, offloads)


def return_freed_memory() -> None:
    """Let glibc return the memory of each large tensor as it is freed, unless its settings are in the environment.

    By itself it would keep the memory of gathered blocks, in pieces that fit nothing else: as much as the whole model.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(parameter, LARGE_BYTES)


def _fill(
    late: Mapping[str, LateTensor], world: World, offloads: bool, module: nn.Module, device: torch.device
) -> None:
    """Give this rank's shards their values, one tensor after another: each rank reads files itself, and has the
    values that rank 0 computes.
    """
    if not late:
        return
    places = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    made: dict[int, Tensor] = {}
    are_in_files = world.broadcast_object([values.source is not None for values in late.values()])
    for (name, values), is_in_file in zip(late.items(), are_in_files, strict=True):
        place = places[name]
        if is_in_file:
            whole = values.compute() if values.source is None else values.source
        else:
            whole = values.compute() if world.rank == 0 else torch.empty(place.shape, dtype=place.dtype)
            whole = whole.to(device)
            world.broadcast_tensor(whole)
        part = whole[shard_of(place)]
        home = torch.device("cpu") if offloads and is_distributed(place) else device
        made[id(place)] = distributed_part(part.to(home, place.dtype, copy=True).contiguous(), place)
        if isinstance(place, nn.Parameter):
            made[id(place)] = nn.Parameter(made[id(place)], requires_grad=place.requires_grad)
    for owner in module.modules():
        for table in (parameter_table(owner), buffer_table(owner)):
            for name, tensor in table.items():
                if id(tensor) in made:
                    table[name] = made[id(tensor)]  # type: ignore[assignment]
    map_tensors(module, lambda tensor: tensor)  # by which FSDP notices that its parameters are others


def build_deferred(build: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, LateTensor]]:
    """Build a model whose large parameters and buffers are on the meta device.

    A model that cannot be built so is built with all its values.

    Returns:
        The model, and the values of its parameters and buffers on the meta device, by name.
    """
    deferred = DeferredInit()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
            with deferred:
                module = build()
        return module, _take_values(module, deferred)
    except PacelineError:
        raise
    except Exception as error:  # whatever a task does with its tensors
        _log.debug("each rank builds the whole model: %s", error)
    return build(), {}


def _take_values(module: nn.Module, deferred: DeferredInit) -> dict[str, LateTensor]:
    """Put tensors on the meta device in the place of deferred ones and of those in files."""
    late: dict[str, LateTensor] = {}
    replaced: dict[int, Tensor] = {}
    kept: list[Tensor] = []  # so that no address is used twice
    for prefix, owner in module.named_modules():
        for table in (parameter_table(owner), buffer_table(owner)):
            for name, tensor in table.items():
                if tensor is None or not (isinstance(tensor, FakeTensor) or is_mapped(tensor)):
                    continue
                if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
                    raise RuntimeError(f"{name!r} has hooks")
                if id(tensor) not in replaced:
                    kept.append(tensor)
                    meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    replaced[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if is_parameter else meta
                    if isinstance(tensor, FakeTensor):
                        view = deferred.view(tensor)
                        values = LateTensor(partial(deferred.compute_view, view), deferred.source(view))
                    else:
                        values = LateTensor(tensor.detach, tensor.detach())
                    late[f"{prefix}.{name}".lstrip(".")] = values
                table[name] = replaced[id(tensor)]  # type: ignore[assignment]
    kept.clear()
    tensor = None
    deferred.require_none_left()
    return late
