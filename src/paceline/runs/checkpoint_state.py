"""Nested state as named tensors and JSON, and back; the tensors as safetensors files."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import CheckpointError
from paceline.runs.checkpoint_manifest import Buffer, parse_json
from paceline.torch_internals import foreach_copy_

# --- Tensors in the safetensors format, with one copy at most between the model and the file ---
#
# ``safetensors.torch.save_file`` would copy the tensors a second time, or read them while training
# changes them. The format: https://huggingface.co/docs/safetensors/index#format


SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""The format's name of each dtype that can be saved."""

TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}

_JOINED_BYTES = 2**16  # smaller tensors are written together
_CHUNK_BYTES = 64 * 2**20  # of page-locked memory, of which the whole state would need twice its size


@dataclass(frozen=True)
class TensorShard:
    """This process's part of a tensor.

    Attributes:
        part: its values.
        shape: of the whole tensor.
        offset: of the part in it.
    """

    part: Tensor
    shape: torch.Size
    offset: tuple[int, ...]


class Snapshot:
    """A copy of named tensors in the CPU's memory, which the next capture uses again.

    Tensors of a GPU come through two page-locked chunks: while one is filled, the other is copied.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, Tensor]] = {}
        self._chunks: list[Tensor] = []

    def capture(self, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy the tensors of each file (file name -> tensor name -> tensor); complete on return.

        Raises:
            CheckpointError: there is not enough memory for the copy.
        """
        sources = [tensor.detach() for tensors in files.values() for tensor in tensors.values()]
        if _layout(files) != _layout(self.files) or (not self._chunks and any(tensor.is_cuda for tensor in sources)):
            self._allocate(files)
        views = [view for tensors in self.files.values() for view in tensors.values()]
        pairs = list(zip(views, sources, strict=True))
        with torch.no_grad():
            for device in {tensor.device for _, tensor in pairs if tensor.is_cuda}:
                with torch.cuda.device(device):
                    self._copy_from_gpu([(view, tensor) for view, tensor in pairs if tensor.device == device])
            here = [(view, tensor) for view, tensor in pairs if not tensor.is_cuda]
            if here:
                foreach_copy_([view for view, _ in here], [tensor for _, tensor in here])

    def _copy_from_gpu(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy tensors of the current GPU into views of the buffer; on return all are copied."""
        pieces = deque(
            (view.reshape(-1).view(torch.uint8)[start : start + _CHUNK_BYTES], tensor, start)
            for view, tensor in pairs
            for start in range(0, view.nbytes, _CHUNK_BYTES)
        )
        chunks = itertools.cycle(self._chunks)
        filled: deque[tuple[torch.cuda.Event, list[Tensor], list[Tensor]]] = deque()
        while pieces or filled:
            if not pieces or len(filled) == len(self._chunks):
                event, into, content = filled.popleft()
                event.synchronize()
                foreach_copy_(into, content)
            if pieces:
                filled.append(_fill(next(chunks), pieces))

    def _allocate(self, files: Mapping[str, Mapping[str, Tensor]]) -> None:
        # Free the old copy first: two would be a second copy of the model.
        self.files = {}
        self._chunks = []
        every = [tensor for tensors in files.values() for tensor in tensors.values()]
        size = sum(tensor.nbytes for tensor in every)
        try:
            self.files = {
                file: {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
                for file, tensors in files.items()
            }
            if any(tensor.is_cuda for tensor in every):
                chunk = min(size, _CHUNK_BYTES)
                self._chunks = [torch.empty(chunk, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        except RuntimeError as error:
            raise CheckpointError(
                f"not enough memory for a snapshot of {size / 2**20:.0f} MiB: {str(error).splitlines()[0]}"
            ) from error


def _layout(files: Mapping[str, Mapping[str, Tensor]]) -> list[tuple[str, str, torch.dtype, torch.Size]]:
    return [
        (file, name, tensor.dtype, tensor.shape) for file, tensors in files.items() for name, tensor in tensors.items()
    ]


def _fill(
    chunk: Tensor, pieces: deque[tuple[Tensor, Tensor, int]]
) -> tuple[torch.cuda.Event, list[Tensor], list[Tensor]]:
    """Begin to copy the next pieces of tensors into a chunk; return what marks the end, their places and the chunk's.

    Args:
        chunk: at least as large as any piece.
        pieces: each with its place in the buffer, the tensor and its first byte there; those that fit are removed.
    """
    into, content, used = [], [], 0
    while pieces and used + pieces[0][0].numel() <= chunk.numel():
        place, tensor, start = pieces.popleft()
        flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        part = chunk[used : used + place.numel()]
        content.append(part.copy_(flat[start : start + place.numel()], non_blocking=True))
        into.append(place)
        used += place.numel()
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event, into, content


def file_contents(tensors: Mapping[str, Tensor]) -> Iterator[Buffer]:
    """Yield a file's header, and its tensors, without a copy of large ones that are contiguous on the CPU."""
    # Widest dtypes first, so that each tensor is aligned without gaps.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    stops = itertools.accumulate(tensors[name].nbytes for name in names)
    entries = {
        name: {
            "dtype": SAFETENSORS_DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [stop - tensors[name].nbytes, stop],
        }
        for name, stop in zip(names, stops, strict=True)
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for is_small, group in itertools.groupby(names, lambda name: tensors[name].nbytes < _JOINED_BYTES):
        contents = (bytes_of(tensors[name]) for name in group)
        yield from (b"".join(contents),) if is_small else contents


def read_tensors(content: bytes) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, on the CPU, in memory of their own.

    Raises:
        CheckpointError: the content is not safetensors.
    """
    # ``safetensors.torch.load`` holds the interpreter while it copies, for seconds in which no heartbeat is sent.
    begin = 8 + int.from_bytes(content[:8], "little")
    try:
        entries = parse_json(content[8:begin], "its header")
        entries.pop("__metadata__", None)
        data = np.frombuffer(content, np.uint8)[begin:]
        places = sorted(tuple(entry["data_offsets"]) for entry in entries.values())
        if [0, *(stop for _, stop in places)] != [*(start for start, _ in places), len(content) - begin]:
            raise ValueError("its tensors do not fill the file one after another")
        tensors = {}
        for name, entry in entries.items():
            source = data[slice(*entry["data_offsets"])]
            target = torch.empty(len(source), dtype=torch.uint8)
            np.copyto(target.numpy(), source)
            tensors[name] = target.view(TORCH_DTYPES[entry["dtype"]]).view(entry["shape"])
        return tensors
    except (CheckpointError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"not a safetensors file: {error}") from error


_COMPILED = "_orig_mod."  # torch.compile's, before the names in a module that a task compiles


def plain_name(name: str) -> str:
    """Return an entry's name in the same model without ``torch.compile``."""
    return name.replace(_COMPILED, "")


def rename_entries(tensors: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return tensors under the names of a model of which other parts may be compiled."""
    spelled = {plain_name(name): name for name in names}
    return {spelled.get(plain_name(name), name): tensor for name, tensor in tensors.items()}


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a tensor's values as bytes, row-major, whatever its device and memory format."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


# --- State as named tensors and a JSON skeleton of everything around them ---


MAX_DEPTH = 100
"""The deepest nesting that is saved or loaded; real states have fewer than ten levels."""

_MAX_INT_BITS = 4096  # Python refuses to parse integers of more than 4,300 digits.


def flatten(state: Any) -> tuple[dict[str, Any], Any]:
    """Split a nested state into its tensors and a JSON skeleton with their places.

    Dicts with str or int keys (and ``OrderedDict``, ``Counter``), lists, tuples, None, bool, int,
    float (infinities and NaN too), str and strided tensors are kept. Subclasses of float, such as
    ``numpy.float64``, become float, and ``Parameter`` becomes ``Tensor``. Tensors with the same memory and layout are
    named once. No tensor is copied; no container is shared with
    ``state``, so the skeleton does not change when ``state`` does.

    Returns:
        The tensors and shards by name (the path of keys, joined by ``/``), and the skeleton.

    Raises:
        CheckpointError: the state contains something else; names its path.
    """
    flattener = _Flattener()
    skeleton = flattener.encode(state, ())
    return flattener.tensors, skeleton


def unflatten(tensors: Mapping[str, Any], skeleton: Any) -> Any:
    """Rebuild the state that :func:`flatten` split; tied places get the same tensor object.

    Raises:
        CheckpointError: the skeleton is malformed, or does not use each tensor exactly once.
    """
    unflattener = _Unflattener(tensors)
    state = unflattener.decode(skeleton, 0)
    unused = tensors.keys() - unflattener.used
    if unused:
        raise CheckpointError(f"the state has no place for the tensor {min(unused)!r}")
    return state


class _Flattener:
    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self._name_of: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": repr(float(value))}
        if kind is int:
            if value.bit_length() > _MAX_INT_BITS:
                raise _unsupported(path, f"an integer of {value.bit_length()} bits")
            return value
        if isinstance(value, Tensor | TensorShard):
            return self._encode_tensor(value, path)
        if len(path) >= MAX_DEPTH:
            raise _unsupported(path[:3], f"nested more than {MAX_DEPTH} levels deep")
        if kind is list:
            return [self.encode(item, (*path, str(i))) for i, item in enumerate(value)]
        if kind is tuple:
            return {"tuple": [self.encode(item, (*path, str(i))) for i, item in enumerate(value)]}
        if kind is Counter:
            return {"counter": self._encode_items(value, path)}
        if kind is dict or kind is OrderedDict:
            if all(type(key) is str for key in value):
                return {"dict": {key: self.encode(item, (*path, key)) for key, item in value.items()}}
            return {"items": self._encode_items(value, path)}
        raise _unsupported(path, f"a {kind.__module__}.{kind.__qualname__}")

    def _encode_items(self, mapping: Mapping[Any, Any], path: tuple[str, ...]) -> list[list[Any]]:
        for key in mapping:
            if type(key) is not str and type(key) is not int:
                raise _unsupported(path, f"a dict with the key {key!r}; keys must be str or int")
        return [[key, self.encode(item, (*path, str(key)))] for key, item in mapping.items()]

    def _encode_tensor(self, value: Tensor | TensorShard, path: tuple[str, ...]) -> dict[str, str]:
        tensor = value.part if isinstance(value, TensorShard) else value
        if type(tensor) is not Tensor and not isinstance(tensor, torch.nn.Parameter):
            raise _unsupported(path, f"a {type(tensor).__name__}; gather it into a plain tensor first")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise _unsupported(path, "a tensor that is sparse, quantized or on the meta device")
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise _unsupported(path, f"a tensor of {tensor.dtype}, which safetensors does not know")
        seen_as = tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
        key = (tensor.device, tensor.data_ptr(), seen_as)
        if key in self._name_of:
            return {"tied": self._name_of[key]}
        name = label = "/".join(path).encode("utf-8", "backslashreplace").decode() or "tensor"
        number = 1
        # Two paths can have the same text ({"a/b": x} and {"a": {"b": x}}), and one name is safetensors' own.
        while name in self.tensors or name == "__metadata__":
            number += 1
            name = f"{label}#{number}"
        self.tensors[name] = value
        if tensor.numel() > 0:  # empty tensors have no distinct address
            self._name_of[key] = name
        return {"tensor": name}


class _Unflattener:
    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors
        self.used: set[str] = set()

    def decode(self, node: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise CheckpointError(f"the state is nested more than {MAX_DEPTH} levels deep")
        if node is None or isinstance(node, bool | int | float | str):
            return node
        if isinstance(node, list):
            return [self.decode(item, depth + 1) for item in node]
        match node:
            case {"tensor": str(name)} if len(node) == 1:
                if name in self.used:
                    raise CheckpointError(f"the state uses the tensor {name!r} twice")
                self.used.add(name)
                return self._tensor(name)
            case {"tied": str(name)} if len(node) == 1:
                return self._tensor(name)
            case {"dict": dict(mapping)} if len(node) == 1:
                return {key: self.decode(item, depth + 1) for key, item in mapping.items()}
            case {"items": list(pairs)} if len(node) == 1:
                return self._decode_items(pairs, depth)
            case {"counter": list(pairs)} if len(node) == 1:
                return Counter(self._decode_items(pairs, depth))
            case {"tuple": list(items)} if len(node) == 1:
                return tuple(self.decode(item, depth + 1) for item in items)
            case {"float": ("nan" | "inf" | "-inf") as text} if len(node) == 1:
                return float(text)
        raise CheckpointError(f"the state holds {str(node)[:80]!r}, which is not a known kind of entry")

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise CheckpointError(f"the tensor {name!r} is missing")
        return self._tensors[name]

    def _decode_items(self, pairs: list[Any], depth: int) -> dict[str | int, Any]:
        decoded = {}
        for pair in pairs:
            match pair:
                case [str() | int() as key, item] if not isinstance(key, bool) and key not in decoded:
                    decoded[key] = self.decode(item, depth + 1)
                case _:
                    raise CheckpointError(f"the state holds the dict entry {str(pair)[:80]!r}")
        return decoded


def _unsupported(path: tuple[str, ...], what: str) -> CheckpointError:
    place = "/".join(path) or "the top"
    return CheckpointError(
        f"the state cannot be saved: at {place} it holds {what}. A checkpoint keeps tensors, numbers, "
        "strings, booleans, None, and lists, tuples and dicts of them."
    )


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Return ``scheduler.state_dict()`` without the functions in it.

    torch's own schedulers omit functions; a user's subclass of ``LRScheduler`` keeps every attribute. A function is
    configuration that ``build_scheduler`` rebuilds, and ``load_state_dict`` leaves attributes without an entry alone.
    """
    return _without_functions(scheduler.state_dict())


def _without_functions(state: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in state.items() if not callable(value)}
    # SequentialLR and ChainedScheduler hold nested states under this name.
    if isinstance(kept.get("_schedulers"), list):
        kept["_schedulers"] = [_without_functions(inner) for inner in kept["_schedulers"]]
    return kept


def model_sha256(
    state_dict: Mapping[str, Any], whole: Callable[[Tensor], Tensor | None] = lambda tensor: tensor
) -> str:
    """Return the SHA-256 of a model's full ``state_dict()``, in hexadecimal.

    It depends on names, dtypes, shapes and values, not on device, memory format, ties or the order
    of the entries. The hash covers ``b"paceline model 1"`` and then, for each entry in the order
    of the names' UTF-8 bytes, four fields: the name; the dtype (``float32``); the shape, as decimal
    numbers joined by commas; the values in row-major order, little-endian. Each field is preceded
    by its length in bytes as an unsigned 64-bit little-endian number. For extra state that is not a tensor, dtype is
    ``json``, the shape is empty, the value is the JSON of :func:`flatten`'s
    skeleton (keys sorted, no spaces), and its tensors follow as ``name/path``.

    Args:
        whole: gathers a tensor, one after another in the same order everywhere; None where it is not needed.

    Raises:
        CheckpointError: :func:`flatten` does not support the extra state.
    """
    digest = hashlib.sha256(b"paceline model 1")
    entries = dict(_entries(state_dict))
    for name in sorted(entries, key=str.encode):
        entry = entries[name]
        value = whole(entry) if isinstance(entry, Tensor) else entry
        if value is None:
            continue
        dtype, shape = "json", ""
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            shape = ",".join(map(str, value.shape))
        content = bytes_of(value) if isinstance(value, Tensor) else value
        for field in (name.encode(), dtype.encode(), shape.encode(), content):
            digest.update(len(field).to_bytes(8, "little"))
            digest.update(field)
    return digest.hexdigest()


def _entries(state_dict: Mapping[str, Any]) -> Iterator[tuple[str, Tensor | bytes]]:
    for name, value in state_dict.items():
        if isinstance(value, Tensor):
            yield name, value
        else:
            tensors, skeleton = flatten(value)
            yield name, json.dumps(skeleton, sort_keys=True, separators=(",", ":")).encode()
            yield from ((f"{name}/{inner}", tensor) for inner, tensor in tensors.items())
