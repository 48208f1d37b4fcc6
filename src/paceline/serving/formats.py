"""The formats of a package: programs, quantized weights, and the way back to a function."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn.utils import parametrize

from paceline.core.errors import ExportError, PackageError
from paceline.core.inference import InferenceSignature
from paceline.core.task import Task
from paceline.core.task_loading import BUILT_IN_TASKS, TaskReference, load_task_class
from paceline.runs.package import Package, read_trusted
from paceline.runs.rank_log import silence_logger_and_warnings
from paceline.serving.trained_source import inference_of

# --- Smaller weights: int8 or bfloat16 in the file, float32 where they are used ---
#
# Each weight matrix is kept in the small type and widened in the forward, by plain tensor operations. So
# every format holds it, and every runtime computes it; activations and biases stay as they are.


Quantization = Literal["int8", "bf16"]

_LARGEST = 127
_TINY = 1e-12  # a row of zeros has no scale
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ROWS_FIRST = (nn.Linear, nn.Embedding, *_CONVOLUTIONS)


class Int8(nn.Module):
    """Symmetric int8 with one scale for each output channel, or each row of an embedding.

    Args:
        channel: the dimension of the channels.
    """

    def __init__(self, channel: int) -> None:
        super().__init__()
        self._channel = channel

    def forward(self, integers: Tensor, scale: Tensor) -> Tensor:
        """int8 and a scale that broadcasts -> the weight, float."""
        return integers.to(scale.dtype) * scale

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A weight -> integers from -127 to 127, and their scale."""
        others = [dim for dim in range(weight.dim()) if dim != self._channel]
        scale = weight.abs().amax(dim=others, keepdim=True).clamp_min(_TINY) / _LARGEST
        return (weight / scale).round().clamp(-_LARGEST, _LARGEST).to(torch.int8), scale


class Bfloat16(nn.Module):
    """The same number with 8 bits for its digits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, short: Tensor) -> Tensor:
        """bfloat16 -> the weight's own type."""
        return short.to(self._dtype)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor]:
        """A weight, rounded to the nearest."""
        return (weight.to(torch.bfloat16),)  # alone, it would have to be of the weight's type


def quantize(model: nn.Module, quantization: Quantization) -> int:
    """Keep the weights of linear layers, convolutions and embeddings in the small type; returns how many.

    The model computes with the rounded weights from then on. It must not need gradients.

    Raises:
        ExportError: it has no such layer.
    """
    changed = 0
    for module in list(model.modules()):
        if not isinstance(module, (*_ROWS_FIRST, *_TRANSPOSED)) or not module.weight.is_floating_point():
            continue
        if parametrize.is_parametrized(module, "weight"):
            continue
        small = (
            Int8(1 if isinstance(module, _TRANSPOSED) else 0)
            if quantization == "int8"
            else Bfloat16(module.weight.dtype)
        )
        parametrize.register_parametrization(module, "weight", small, unsafe=True)
        changed += 1
    if not changed:
        raise ExportError(
            f"--quantize {quantization}: the model has no linear layer, convolution or embedding to "
            "make smaller. "
            "Leave --quantize out."
        )
    return changed


# --- What runs without the task's code: written by torch.export and torch.onnx, and read back ---


Compute = Callable[[Sequence[Tensor]], Mapping[str, Tensor]]
"""A format of the model: inputs in their order -> outputs by name."""

PROGRAM_FILES = {"pt2": "program.pt2", "onnx": "model.onnx"}
_TORCHS_EXPORTERS = "torch.onnx"
_EXAMPLE_SAMPLES = 2  # torch.export takes a size of 1 for a constant


def capture(inference: InferenceSignature, inputs: Sequence[Tensor]) -> ExportedProgram:
    """Trace the function for any batch size, and any size where a shape says None.

    Args:
        inference: what is traced.
        inputs: a batch of at least two samples; its values do not get into the program.

    Raises:
        ExportError: torch.export cannot trace it; says where.
    """
    example, dynamic = [], []
    batch = Dim("batch")
    for spec, tensor in zip(inference.inputs.values(), inputs, strict=True):
        example.append(torch.zeros_like(tensor[:_EXAMPLE_SAMPLES]))
        # DYNAMIC, and not a name of its own: the lengths of tokens and of their mask may have to be equal.
        open_sizes = {d: Dim.DYNAMIC for d, size in enumerate(spec.shape, 1) if size is None}
        dynamic.append({0: batch, **open_sizes})
    return trace(inference.module, tuple(example), tuple(dynamic))


def trace(module: nn.Module, example: tuple[Any, ...], dynamic: Any = None) -> ExportedProgram:
    """``torch.export.export``, whose errors say what to do.

    Raises:
        ExportError: it cannot trace the module.
    """
    try:
        with silence_logger_and_warnings(_TORCHS_EXPORTERS), torch.no_grad():
            return torch.export.export(module, example, dynamic_shapes=dynamic)
    except Exception as error:
        raise ExportError(
            f"torch.export cannot trace {type(module).__name__}: {_first_lines(error)}\n"
            "A program takes tensor operations only: no branches on values, and no sizes fixed by the batch. "
            "--format safetensors exports the weights alone, which run with the task's code."
        ) from error


def save_pt2(program: ExportedProgram, path: Path) -> None:
    """Write a program as torch does."""
    with silence_logger_and_warnings(_TORCHS_EXPORTERS):
        torch.export.save(program, path)


def load_pt2(content: bytes) -> Compute:
    """The function in a pt2 file; loading it may run any code, so its origin must be trusted."""
    with silence_logger_and_warnings(_TORCHS_EXPORTERS):
        module = torch.export.load(io.BytesIO(content)).module()

    def compute(inputs: Sequence[Tensor]) -> Mapping[str, Tensor]:
        with torch.no_grad():
            outputs: Mapping[str, Tensor] = module(*inputs)
        return outputs

    return compute


def require_onnx() -> None:
    """Before hours are spent.

    Raises:
        ExportError: a package is missing; says how to install it.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ExportError(
            f"--format onnx needs {error.name}, which is not installed. Run: pip install 'paceline[onnx]'"
        ) from error


def save_onnx(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], path: Path) -> None:
    """Write a program as ONNX; weights of more than 2 GB go into a file beside it.

    Raises:
        ExportError: an operation has no ONNX form; names it.
    """
    try:
        with silence_logger_and_warnings(_TORCHS_EXPORTERS):
            converted = torch.onnx.export(
                program, dynamo=True, input_names=list(inputs), output_names=list(outputs), verbose=False
            )
            assert converted is not None
            converted.save(str(path))
    except Exception as error:
        raise ExportError(
            f"--format onnx: torch.onnx cannot write this model: {_first_lines(error)}\n"
            "Leave onnx out of --format; pt2 takes every torch operation."
        ) from error


def load_onnx(content: bytes, outputs: Sequence[str], beside: Mapping[str, bytes] = MappingProxyType({})) -> Compute:
    """The function of an ONNX model, by onnxruntime on the CPU.

    Args:
        content: the model.
        outputs: their names, in their order.
        beside: file name -> content of the weights that the model does not hold itself.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    if beside:
        contents = list(beside.values())
        options.add_external_initializers_from_files_in_memory(list(beside), contents, [len(each) for each in contents])
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    held = (session, beside)  # it may look into these for as long as it lives

    def compute(inputs: Sequence[Tensor]) -> Mapping[str, Tensor]:
        arrays = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
        return dict(zip(outputs, map(torch.from_numpy, held[0].run(None, arrays)), strict=True))

    return compute


def layer_alone(layer: nn.Module, kind: str, given: tuple[Any, ...]) -> Tensor:
    """One layer's output in a format.

    Raises:
        ExportError: it cannot be written in that format by itself.
    """
    if kind == "safetensors":
        with torch.no_grad():
            return cast(Tensor, layer(*given))
    program = trace(_NamedLayer(layer), given)
    with tempfile.TemporaryDirectory(prefix="paceline-layer-") as directory:
        path = Path(directory) / PROGRAM_FILES[kind]
        if kind == "pt2":
            save_pt2(program, path)
            return load_pt2(path.read_bytes())(given)["output"]
        save_onnx(program, [f"input_{number}" for number in range(len(given))], ["output"], path)
        return load_onnx(path.read_bytes(), ["output"])(given)["output"]


class _NamedLayer(nn.Module):
    """A layer whose output has a name."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *values: Tensor) -> dict[str, Tensor]:
        return {"output": self.layer(*values)}


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:500] or type(error).__name__


# --- From a package back to a function: its weights with the task's code, or a program that it holds ---


TIED = "tied"
"""In the metadata of the weights: entry -> the entry that it is the same tensor as, as JSON."""


def weights_bytes(model: nn.Module) -> bytes:
    """A model's state as safetensors; what is tied is in it once.

    Raises:
        ExportError: the state holds something that is no tensor.
    """
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ExportError(
                f"the model's state has {name!r}, a {type(value).__name__}; a package holds tensors "
                "only. Keep it in a "
                "buffer, or build it from the task's fields."
            )
        place = (value.data_ptr(), value.dtype, value.shape, value.stride())
        if value.numel() and place in first:
            tied[name] = first[place]
            continue
        first[place] = name
        tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)
    return safetensors.torch.save(tensors, {TIED: json.dumps(tied)} if tied else None)


def load_with_task(package: Package, task: Task | str | None = None) -> InferenceSignature:
    """The function of a package by the task's own code: its weights can run no code of their own.

    Args:
        package: verified.
        task: the task, or its name, which is then given the package's hyperparameters; None is the task that
            the package names, where it is a recipe or this user trusts the package.

    Raises:
        TaskError: the task cannot be found or built.
        PackageError: the weights do not fit the task, or it is not said which code may run.
    """
    if not isinstance(task, Task):
        spec = task_of(package, task)
        load_task_class(spec)  # says what is wrong with the name before fields are blamed
        task = TaskReference(spec, package.manifest.provenance.fields).load()
    model = task.build_model()
    model.eval().requires_grad_(False)
    load_weights(model, package.read_weights(), package.manifest.quantization)
    return inference_of(task, model)


def task_of(package: Package, task: str | None) -> str:
    """The name of the task whose code may run.

    Args:
        package: verified.
        task: what the user names; None is the task that the package names.

    Raises:
        PackageError: the user names none, and the package is not trusted.
    """
    spec = package.manifest.provenance.task if task is None else task
    if task is None and spec not in BUILT_IN_TASKS and package.digest not in read_trusted():
        # Importing it runs it, and the name is only the package's word.
        raise PackageError(
            f"package {package.path} says that it is of the task {spec}, and you have not trusted it. "
            "Name the task yourself, with --task, or say --trust once."
        )
    return spec


def load_weights(model: nn.Module, content: bytes, quantization: str | None) -> None:
    """Put a package's weights into a model that was just built; it is quantized as they are.

    Raises:
        PackageError: they do not fit.
    """
    if quantization is not None:
        if quantization not in get_args(Quantization):
            raise PackageError(
                f"the package is quantized by {quantization!r:.80}, which this version of Paceline does not know."
            )
        quantize(model, cast(Quantization, quantization))
    try:
        tensors = safetensors.torch.load(content)
        for name, same in _tied(content).items():
            tensors[name] = tensors[same]
        model.load_state_dict(tensors)
    except (SafetensorError, RuntimeError, KeyError, ValueError, AttributeError) as error:
        raise PackageError(
            f"the package's weights do not fit the task: {error}\nUse the code and the fields that it was trained with."
        ) from error


def load_program(package: Package, program: str) -> Compute:
    """A program of a package, ready to be called.

    Raises:
        UntrustedError: it is a pt2, and this user has not trusted the package.
        PackageError: it has no such program, or was changed.
        ExportError: onnxruntime is missing.
    """
    content = package.read_program(program)
    if program == "pt2":
        return load_pt2(content)
    require_onnx()
    # Weights of more than 2 GB are in files of their own, which the model names.
    name = package.manifest.programs[program]
    beside = {file: package.read(file) for file in package.manifest.files if file.startswith(f"{name}.")}
    return load_onnx(content, list(package.manifest.outputs), beside)


def _tied(content: bytes) -> Mapping[str, str]:
    """From the header, which is JSON: safetensors has a reader of metadata for files only."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    tied = json.loads(header.get("__metadata__", {}).get(TIED, "{}"))
    return {str(name): str(same) for name, same in tied.items()}
