"""Weights in a directory of ``torch.distributed.checkpoint``, as torchtitan and scripts with FSDP write it."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from paceline.core.errors import CheckpointError

METADATA = ".metadata"

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    *((_METADATA_MODULE, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((_METADATA_MODULE, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    (_METADATA_MODULE, "TensorProperties"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
}
_MODELS = {"model", "model_state", "model_state_dict", "module", "state_dict"}
_MALFORMED = (AttributeError, EOFError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def read_torch_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read a model's tensors, whole, on the CPU.

    The model is the state's entry ``model``, or of another usual name; without one, the tensors outside of entries, as
    torchtitan saves them. Nothing in the directory can run code: the pickle there may only name classes of torch's
    description of a checkpoint, and other entries than tensors stay unread.
    """
    error: BaseException
    try:
        with (path / METADATA).open("rb") as file:
            metadata = _Unpickler(file).load()
        names = _model_names(metadata)
        entries = metadata.state_dict_metadata
        tensors = {key: torch.empty(entries[key].size, dtype=entries[key].properties.dtype) for key in names}
        for place in metadata.storage_data.values():
            if Path(place.relative_path).name != place.relative_path:
                raise ValueError(f"it names {place.relative_path}, which is not a file of the directory")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this process reads alone
            load(dict(tensors), storage_reader=_Reader(path, metadata), no_dist=True)
    except CheckpointException as failed:
        error = next(iter(failed.failures.values()))[0]
    except (OSError, pickle.UnpicklingError, *_MALFORMED) as failed:
        error = failed
    else:
        return {names[key]: tensor for key, tensor in tensors.items()}
    reason = str(error) or type(error).__name__
    raise CheckpointError(f"{path} cannot be read as a checkpoint of torch.distributed: {reason}.") from error


def _model_names(metadata: Metadata) -> dict[str, str]:
    """Return the tensors of the model: their keys in the checkpoint, and their names in the model."""
    paths = metadata.planner_data or {}
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        *group, name = map(str, paths.get(key, (key,)))
        if isinstance(entry, TensorStorageMetadata) and not any("optim" in each for each in group):
            groups.setdefault(tuple(group), {})[key] = name
    models = [group for group in groups if group and group[-1] in _MODELS] or [group for group in groups if not group]
    if len(models) != 1:
        found = ", ".join(sorted("/".join(group) or "no entry" for group in groups)) or "none"
        raise ValueError(
            f"no single entry of its state is the model's; there are tensors of {found}. "
            'Save it as {"model": model.state_dict()}'
        )
    return groups[models[0]]


class _Unpickler(pickle.Unpickler):
    """Reads a checkpoint's description, whose classes only hold values."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) == ("torch.serialization", "_get_layout"):
            return {"torch.strided": torch.strided}.__getitem__
        if (module, name) in _CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its {METADATA} names {module}.{name}, which a checkpoint does not need")


class _Reader(FileSystemReader):
    """torch's reader, with a description that has been read."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata
