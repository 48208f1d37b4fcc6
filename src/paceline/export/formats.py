"""The formats of a package: programs and quantized weights, and loading them again."""

from __future__ import annotations

import inspect
import io
import itertools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn.utils import parametrize

from paceline.core.errors import ExportError, PackageError
from paceline.core.inference import InferenceSignature
from paceline.core.ownership import own_prefix
from paceline.core.plugins import import_library
from paceline.core.task import Task
from paceline.core.task_loading import BUILT_IN_TASKS, TaskReference, load_task_class
from paceline.export.inferred_signature import restore_signature
from paceline.export.onnx_program import OnnxProgram
from paceline.export.trained_source import inference_of
from paceline.runs.checkpoint_state import plain_name, rename_entries
from paceline.runs.package import Package, read_trusted
from paceline.runs.rank_log import silence_loggers_and_warnings

# --- Quantized weights: int8 or bfloat16 in the file, float32 where they are used ---
#
# Each weight matrix is stored in the small type and converted in the forward by plain tensor operations, so
# every format can hold it and every runtime can compute it. Activations and biases are not quantized.


Quantization = Literal["int8", "bf16"]

_MAX_INT8 = 127
_MIN_SCALE = 1e-12  # for rows of zeros
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CHANNEL_FIRST = (nn.Linear, nn.Embedding, *_CONVOLUTIONS)


class Int8(nn.Module):
    """Symmetric int8 with one scale per output channel, or per row of an embedding; ``channel`` is its dimension."""

    def __init__(self, channel: int) -> None:
        super().__init__()
        self._channel = channel

    def forward(self, integers: Tensor, scale: Tensor) -> Tensor:
        """Return the weight of int8 values and a scale that broadcasts."""
        return integers.to(scale.dtype) * scale

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return a weight's integers from -127 to 127, and their scale."""
        other_dims = [dim for dim in range(weight.dim()) if dim != self._channel]
        scale = weight.abs().amax(dim=other_dims, keepdim=True).clamp_min(_MIN_SCALE) / _MAX_INT8
        return (weight / scale).round().clamp(-_MAX_INT8, _MAX_INT8).to(torch.int8), scale


class Bfloat16(nn.Module):
    """Weights rounded to bfloat16."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, short: Tensor) -> Tensor:
        """Convert bfloat16 to the weight's own type."""
        return short.to(self._dtype)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor]:
        """Round a weight to the nearest bfloat16."""
        return (weight.to(torch.bfloat16),)  # a single tensor would need the weight's type


def quantize(model: nn.Module, quantization: Quantization) -> int:
    """Quantize the weights of linear layers, convolutions and embeddings; return the number of weights.

    From then on the model computes with the rounded weights. It must not need gradients.

    Raises:
        ExportError: the model has no such layer.
    """
    num_quantized = 0
    for module in list(model.modules()):
        if not isinstance(module, (*_CHANNEL_FIRST, *_TRANSPOSED)) or not module.weight.is_floating_point():
            continue
        if parametrize.is_parametrized(module, "weight"):
            continue
        parametrization = (
            Int8(1 if isinstance(module, _TRANSPOSED) else 0)
            if quantization == "int8"
            else Bfloat16(module.weight.dtype)
        )
        parametrize.register_parametrization(module, "weight", parametrization, unsafe=True)
        num_quantized += 1
    if not num_quantized:
        raise ExportError(
            f"--quantize {quantization}: the model has no linear layer, convolution or embedding to quantize. "
            "Leave --quantize out."
        )
    return num_quantized


# --- Programs that run without the task's code, written by torch.export and torch.onnx ---


Compute = Callable[[Sequence[Tensor]], Mapping[str, Tensor]]
"""A format of the model: inputs in order -> outputs by name."""

PROGRAM_FILES = {"pt2": "program.pt2", "onnx": "model.onnx"}
_EXPORT_LOGGER = "torch.onnx"
_ONNX_LOGGERS = (_EXPORT_LOGGER, "onnxscript", "onnx_ir")
_TORCH_ADVICE = ("For more information about this error", "The error above occurred when calling")
_EXAMPLE_SAMPLES = 2  # torch.export treats a size of 1 as a constant


def capture(inference: InferenceSignature, inputs: Sequence[Tensor]) -> ExportedProgram:
    """Trace the module for any batch size, and any size where a shape has None.

    Args:
        inputs: a batch of at least two samples, whose values do not become part of the program.

    Raises:
        ExportError: torch.export cannot trace it; says where.
    """
    example, dynamic = [], []
    batch = Dim("batch")
    for spec, tensor in zip(inference.inputs.values(), inputs, strict=True):
        example.append(torch.zeros_like(tensor[:_EXAMPLE_SAMPLES]))
        # DYNAMIC without a name, since the lengths of tokens and of their mask may have to be equal.
        open_sizes = {d: Dim.DYNAMIC for d, size in enumerate(spec.shape, 1) if size is None}
        dynamic.append({0: batch, **open_sizes})
    module = without_compile(inference.module)
    return trace(module, tuple(example), _arrange_sizes(module, dynamic))


def without_compile(module: nn.Module) -> nn.Module:
    """Return a module, each of whose parts that ``torch.compile`` returned is replaced by the part itself."""
    module = getattr(module, "_orig_mod", module)
    for name, child in list(module.named_children()):
        setattr(module, name, without_compile(child))
    return module


def _arrange_sizes(module: nn.Module, sizes: Sequence[Any]) -> tuple[Any, ...]:
    """Return each input's sizes in the form of ``forward``'s parameters: for torch.export, ``*args`` is one of them."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    variadic = next((n for n, parameter in enumerate(parameters) if parameter.kind is parameter.VAR_POSITIONAL), None)
    if variadic is None:
        return tuple(sizes)
    return (*sizes[:variadic], tuple(sizes[variadic:]))


def trace(module: nn.Module, example: tuple[Any, ...], dynamic: Any = None) -> ExportedProgram:
    """Call ``torch.export.export``, with errors that say what to do.

    Raises:
        ExportError: the module cannot be traced.
    """
    try:
        with silence_loggers_and_warnings(_EXPORT_LOGGER), torch.no_grad():
            return torch.export.export(module, example, dynamic_shapes=dynamic)
    except Exception as error:
        raise ExportError(
            f"torch.export cannot trace {type(module).__name__}: {_first_lines(error)}\n"
            "A program can contain tensor operations only: no branches on values, and no sizes fixed by the batch. "
            "--format safetensors exports the weights alone, which run with the task's code."
        ) from error


def save_pt2(program: ExportedProgram, path: Path) -> None:
    """Write a program with ``torch.export.save``."""
    with silence_loggers_and_warnings(_EXPORT_LOGGER):
        torch.export.save(program, path)


def load_pt2(content: bytes) -> Compute:
    """Load the function of a pt2 file; this may run any code, so the file must be trusted."""
    with silence_loggers_and_warnings(_EXPORT_LOGGER):
        return compute_with(torch.export.load(io.BytesIO(content)).module())


def compute_with(module: nn.Module) -> Compute:
    """Return the function of a module, without gradients."""

    def compute(inputs: Sequence[Tensor]) -> Mapping[str, Tensor]:
        with torch.no_grad():
            outputs: Mapping[str, Tensor] = module(*inputs)
        return outputs

    return compute


def require_onnx() -> None:
    """Check that ONNX can be exported, before a long evaluation.

    Raises:
        ExportError: a package is missing; says how to install it.
    """
    for name in ("onnx", "onnxruntime", "onnxscript"):
        import_library(name, "--format onnx", "onnx", ExportError)


def save_onnx(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], path: Path) -> None:
    """Write a program as ONNX, with weights of more than 2 GB in a separate file.

    Raises:
        ExportError: an operation has no ONNX form; names it.
    """
    try:
        with silence_loggers_and_warnings(*_ONNX_LOGGERS):
            converted = torch.onnx.export(
                program, dynamo=True, input_names=list(inputs), output_names=list(outputs), verbose=False
            )
            assert converted is not None
            converted.save(str(path))
    except Exception as error:
        raise ExportError(
            f"--format onnx: torch.onnx cannot write this model: {_first_lines(error)}\n"
            "Leave onnx out of --format; pt2 supports every torch operation."
        ) from error


def load_onnx(content: bytes, outputs: Sequence[str], read: Callable[[str], bytes]) -> Compute:
    """Load the function of an ONNX model, run by onnxruntime on the CPU.

    Args:
        outputs: their names, in order.
        read: returns the file of this name, which holds weights of the model.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    program = OnnxProgram(content, read, options, ["CPUExecutionProvider"])

    def compute(inputs: Sequence[Tensor]) -> Mapping[str, Tensor]:
        arrays = {name: tensor.numpy() for name, tensor in zip(program.inputs, inputs, strict=True)}
        return dict(zip(outputs, map(torch.from_numpy, program.run(program.outputs, arrays)), strict=True))

    return compute


def run_layer(layer: nn.Module, kind: str, arguments: tuple[Any, ...]) -> Tensor:
    """Return one layer's output in a format.

    Raises:
        ExportError: the layer alone cannot be written in that format.
    """
    if kind == "safetensors":
        with torch.no_grad():
            return cast(Tensor, layer(*arguments))
    program = trace(_NamedLayer(layer), arguments)
    with tempfile.TemporaryDirectory(prefix=own_prefix("layer")) as directory:
        path = Path(directory) / PROGRAM_FILES[kind]
        if kind == "pt2":
            save_pt2(program, path)
            return load_pt2(path.read_bytes())(arguments)["output"]
        save_onnx(program, [f"input_{number}" for number in range(len(arguments))], ["output"], path)
        return load_onnx(path.read_bytes(), ["output"], lambda name: (path.parent / name).read_bytes())(arguments)[
            "output"
        ]


class _NamedLayer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *values: Tensor) -> dict[str, Tensor]:
        return {"output": self.layer(*values)}


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = list(itertools.takewhile(lambda line: not line.startswith(_TORCH_ADVICE), lines))
    return " ".join(lines[:3])[:500] or type(error).__name__


# --- Loading: weights with the task's code, or a program ---


TIED = "tied"
"""Metadata key of the weights: JSON of entry -> the entry that is the same tensor."""


def weights_bytes(model: nn.Module) -> bytes:
    """Return a model's state as safetensors, with tied tensors stored once.

    Raises:
        ExportError: the state contains something other than tensors.
    """
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ExportError(
                f"the model's state has {name!r}, a {type(value).__name__}; a package holds tensors only. Keep it in "
                "a buffer, or build it from the task's fields."
            )
        name = plain_name(name)
        storage = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() and storage in first:
            tied[name] = first[storage]
            continue
        first[storage] = name
        tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)
    return safetensors.torch.save(tensors, {TIED: json.dumps(tied)} if tied else None)


def load_with_task(package: Package, task: Task | str | None = None) -> InferenceSignature:
    """Return the inference signature of a package's weights with the task's own code.

    Args:
        package: verified.
        task: the task, or its name, to be built with the package's hyperparameters; None is the task that the
            package names, if it is a built-in task or this user trusts the package.

    Raises:
        TaskError: the task cannot be found or built.
        PackageError: the weights do not fit the task, or the code is not trusted.
    """
    if not isinstance(task, Task):
        spec = task_of(package, task)
        load_task_class(spec)  # report a wrong name before wrong fields
        task = TaskReference(spec, package.manifest.provenance.fields).load()
    model = task.build_model()
    model.eval().requires_grad_(False)
    load_weights(model, package.read_weights(), package.manifest.quantization)
    manifest = package.manifest
    inferred = partial(restore_signature, inputs=manifest.inputs, outputs=manifest.outputs)
    return inference_of(task, model, lambda task, model: inferred(model))


def task_of(package: Package, task: str | None) -> str:
    """Return the name of the task whose code may run.

    Args:
        package: verified.
        task: named by the user; None is the task that the package names.

    Raises:
        PackageError: the user names no task, and the package is not trusted.
    """
    spec = package.manifest.provenance.task if task is None else task
    if task is None and spec not in BUILT_IN_TASKS and package.digest not in read_trusted():
        # Importing a task runs its code, and the package alone vouches for its name.
        raise PackageError(
            f"package {package.path} names the task {spec}, but you have not trusted this package. "
            "Name the task with --task, or give --trust once."
        )
    return spec


def load_weights(model: nn.Module, content: bytes, quantization: str | None) -> None:
    """Load a package's weights into a new model, which is quantized like them.

    Raises:
        PackageError: the weights do not fit.
    """
    if quantization is not None:
        if quantization not in get_args(Quantization):
            raise PackageError(
                f"the package is quantized by {quantization!r:.80}, which this version of Paceline does not support."
            )
        quantize(model, cast(Quantization, quantization))
    try:
        tensors = safetensors.torch.load(content)
        for name, original in _tied_tensors(content).items():
            tensors[name] = tensors[original]
        model.load_state_dict(rename_entries(tensors, model.state_dict()))
    except (SafetensorError, RuntimeError, KeyError, ValueError, AttributeError) as error:
        raise PackageError(
            f"the package's weights do not fit the task: {error}\nUse the code and the fields that it was trained with."
        ) from error


def load_program(package: Package, program: str) -> Compute:
    """Load a program of a package.

    Raises:
        UntrustedError: it is a pt2, and this user has not trusted the package.
        PackageError: the package does not have the program, or was changed.
        ExportError: onnxruntime is missing.
    """
    content = package.read_program(program)
    if program == "pt2":
        return load_pt2(content)
    require_onnx()
    return load_onnx(content, list(package.manifest.outputs), package.read)


def _tied_tensors(content: bytes) -> Mapping[str, str]:
    """Read the tied tensors from the JSON header; safetensors reads metadata from files only."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    tied = json.loads(header.get("__metadata__", {}).get(TIED, "{}"))
    return {str(name): str(original) for name, original in tied.items()}
