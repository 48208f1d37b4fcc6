"""The task: what a user writes, in plain PyTorch."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import json
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from paceline.errors import TaskError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.optim import Optimizer

    from paceline.callback import BatchPlace, Callback, Horizon
    from paceline.inference import Inference

RECIPES = {
    "fashion-mnist": "paceline.recipes.fashion_mnist:FashionMNIST",
    "fashion-mnist-mlp": "paceline.recipes.fashion_mnist:FashionMNISTMLP",
    "transformer": "paceline.recipes.transformer:Transformer",
}
"""Built-in recipes: name -> module:class."""


class Loss(NamedTuple):
    """A loss whose samples do not all weigh the same (tokens, ignored labels).

    Attributes:
        sum: scalar tensor, the sum of the losses; differentiable.
        weight: what ``sum`` is divided by, once, after the sums of all shards are added up.
    """

    sum: torch.Tensor
    weight: torch.Tensor | float


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a task recommends for its runs; any option on the command line wins."""

    global_batch_size: int | None = None
    shards: int | None = None
    epochs: int = 1
    best: str | None = None


@dataclass
class Task:
    """A training task: a dataclass whose fields are its hyperparameters.

    Subclass it as a dataclass and write the methods. Only :meth:`build_model`,
    :meth:`build_dataset`, :meth:`build_optimizer` and :meth:`loss` are required.
    """

    defaults: ClassVar[Defaults] = Defaults()
    min_shard: ClassVar[int] = 2
    """The fewest samples a shard may hold (batch norm cannot take one)."""

    static_graph: ClassVar[bool] = False
    """Every step uses the same parameters in the same way; lets DistributedDataParallel do less."""

    def build_model(self) -> nn.Module:
        """Return the model, on the CPU; Paceline seeds before the call and moves it after."""
        raise TaskError(f"{type(self).__name__} must define build_model(self).")

    def build_dataset(self, split: str) -> Any:
        """Return the dataset of ``split`` ("train", "val" or "test"), or None where there is none.

        A map-style dataset (``__len__`` and ``__getitem__``) or a ``TensorDataset``; for "train" also an
        ``IterableDataset`` or a :class:`paceline.data.stream.ShardedStream`.
        """
        raise TaskError(f"{type(self).__name__} must define build_dataset(self, split).")

    def build_optimizer(self, model: nn.Module) -> Optimizer | Mapping[str, Optimizer]:
        """Return one optimizer, or several by name; they are stepped in that order."""
        raise TaskError(f"{type(self).__name__} must define build_optimizer(self, model).")

    def build_scheduler(self, optimizer: Optimizer, total_steps: int) -> Any:
        """Return a learning-rate scheduler, stepped after each step, or None.

        ``ReduceLROnPlateau`` is stepped after each evaluation instead, with the ``--best`` metric.
        Called once for each optimizer. ``total_steps`` is the whole run's number of steps; for a stream
        trained by epochs nobody knows it, it is 0, and only ``ReduceLROnPlateau`` can be returned.
        """
        return None

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor | Loss:
        """Return the mean loss over the batch's samples, or a :class:`Loss`."""
        raise TaskError(f"{type(self).__name__} must define loss(self, model, batch).")

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Return metrics of an evaluation batch: name -> what it adds.

        A 1-d tensor is one value for each sample; a pair ``(sum, weight)`` is added up; for a
        name in :meth:`build_metrics`, the arguments of that torchmetrics object's ``update``.
        """
        return {}

    def build_metrics(self) -> Mapping[str, Any]:
        """Return torchmetrics objects, by name, for metrics that do not decompose (AUROC)."""
        return {}

    def recommended_batch_size(self) -> int:
        """The global batch size where neither options nor ``defaults`` name one."""
        return 64

    def tensor_parallel_plan(self, model: nn.Module) -> Mapping[str, ParallelStyle] | None:
        """Return how ``--strategy tp`` splits the model's layers, or None to have them found.

        Module name (with ``*`` for any) -> a style of ``torch.distributed.tensor.parallel``, as
        ``parallelize_module`` takes them. What is not named is not split.
        """
        return None

    def sequence_parallel_plan(self, model: nn.Module) -> Mapping[str, ParallelStyle] | None:
        """Return how ``--strategy tp --sequence-parallel`` splits the model, or None where it cannot.

        As :meth:`tensor_parallel_plan`, with norms and what else lies between the split layers computed on
        parts of the sequence.
        """
        return None

    def build_callback(self, model: nn.Module, horizon: Horizon) -> Callback:
        """Return what is called at fixed points of the training; made after the model, before optimizers."""
        from paceline.callback import Callback

        return Callback()

    def pipeline_blocks(self, model: nn.Module) -> Sequence[Any] | None:
        """Return the parts that the model's forward runs one after the other, for ``--strategy pp``.

        Each is a module, or a pair of a function and a list of the modules and parameters that it uses. The
        first is called with the model's arguments, each other one with what the one before it returned (a
        tuple is unpacked). None: they are found by tracing the model's forward.
        """
        return None

    def build_inference(self, model: nn.Module) -> Inference | None:
        """Return what the trained model does for others: what is exported, served and analysed.

        ``model`` is in evaluation mode; the returned module holds it. None: it is only trained.
        """
        return None

    def inference_batch(self, batch: Any) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
        """Split a batch of a dataset: the inputs of :meth:`build_inference`'s module, and what it should say.

        Returns:
            The inputs in their order; and the number of each sample's class, int64 (B,), or None where
            there are no classes.
        """
        raise TaskError(
            f"{type(self).__name__} defines build_inference and must define inference_batch(self, batch)."
        )

    def begin_batch(self, place: BatchPlace) -> None:
        """Note where the batch stands that :meth:`loss` or :meth:`metrics` is called with next."""

    def sample_sizes(self, dataset: Any) -> Any:
        """Return how heavy each sample of the training data is, or None where all are alike.

        Whole numbers, one a sample in the dataset's order: tokens, pixels, points. The shards of a step,
        which are the micro-batches of a pipeline, then have the same numbers of samples and sizes that add
        up to about the same. ``dataset`` is what :meth:`build_dataset` returned for "train", map-style.
        """
        return None

    def collate(self, samples: list[Any]) -> Any:
        """Turn a list of samples into a batch; the default is ``torch.utils.data.default_collate``."""
        from torch.utils.data import default_collate

        return default_collate(samples)


@dataclass(frozen=True)
class TaskReference:
    """A task by name, with the values of its fields; what travels to every worker.

    Attributes:
        spec: ``file.py:Name``, ``package.module:Name`` or a recipe's name.
        fields: field name -> value (JSON types).
    """

    spec: str
    fields: Mapping[str, Any]

    def load(self) -> Task:
        """Import the class and build the task.

        Raises:
            TaskError: the spec, the file or a field is wrong; the message says how.
        """
        return build_task(load_task_class(self.spec), self.fields)


def check_spec(spec: str) -> tuple[str, str]:
    """The file or module of a task, and its class; nothing is imported.

    Raises:
        TaskError: the spec has another form, or its file is not there.
    """
    place, name = split_spec(spec)
    if place.endswith(".py") and not Path(place).expanduser().is_file():
        raise TaskError(f"task {spec!r}: there is no file {Path(place).expanduser().resolve()}.")
    return place, name


def split_spec(spec: str) -> tuple[str, str]:
    """The file or module of a task, and its class, wherever they are.

    Raises:
        TaskError: the spec has another form.
    """
    if not spec:
        raise TaskError(
            "no task was given. Write paceline train TASK, where TASK is file.py:Name or a recipe."
        )
    place, separator, name = RECIPES.get(spec, spec).rpartition(":")
    if not separator or not place or not name:
        raise TaskError(
            f"task {spec!r} is not a recipe and names no class.\n"
            f"  Write file.py:Name or package.module:Name, or one of the recipes: {', '.join(RECIPES)}."
        )
    return place, name


def load_task_class(spec: str) -> type[Task]:
    """Return the task class that ``spec`` names.

    Raises:
        TaskError: with what was looked for and what there is instead.
    """
    place, name = check_spec(spec)
    module = _import_file(Path(place), spec) if place.endswith(".py") else _import_module(place, spec)
    found = getattr(module, name, None)
    if found is None:
        there = [n for n, v in vars(module).items() if _is_task_class(v) and v.__module__ == module.__name__]
        hint = (
            f"It defines: {', '.join(there)}."
            if there
            else "It defines no task (a dataclass that extends paceline.Task)."
        )
        raise TaskError(f"{place} has no {name!r}. {hint}")
    if not _is_task_class(found):
        raise TaskError(f"{spec}: {name} is not a task; it must be a dataclass that extends paceline.Task.")
    return typing.cast(type[Task], found)


def _is_task_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Task) and value is not Task


def _import_module(name: str, spec: str) -> types.ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise TaskError(
                f"task {spec!r}: there is no module {error.name!r} here "
                "(looked in the current directory and the environment)."
            ) from error
        raise TaskError(f"task {spec!r}: {name} imports {error.name!r}, which is not installed.") from error
    except SyntaxError as error:
        raise TaskError(_syntax_message(spec, error)) from error


def _import_file(path: Path, spec: str) -> types.ModuleType:
    path = path.expanduser().resolve()
    # Under `python train.py` the file is already imported: as __main__.
    main = sys.modules.get("__main__")
    main_file = getattr(main, "__file__", None)
    if main is not None and main_file is not None and Path(main_file).resolve() == path:
        return main
    module_name = f"paceline_task_{path.stem}"
    loaded = sys.modules.get(module_name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise TaskError(f"task {spec!r}: {path} is not a Python file.")
    module = importlib.util.module_from_spec(module_spec)
    # Registered before it runs: dataclasses and data workers look the module up by name.
    sys.modules[module_name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[module_name]
        if isinstance(error, SyntaxError):
            raise TaskError(_syntax_message(spec, error)) from error
        if isinstance(error, ModuleNotFoundError):
            raise TaskError(
                f"task {spec!r}: {path.name} imports {error.name!r}, which is not installed."
            ) from error
        raise
    return module


def _syntax_message(spec: str, error: SyntaxError) -> str:
    line = f"\n    {error.text.strip()}" if error.text else ""
    return f"task {spec!r}: syntax error in {error.filename}, line {error.lineno}: {error.msg}{line}"


def build_task(task_class: type[Task], values: Mapping[str, Any]) -> Task:
    """Build a task from field values; strings are converted to the field's type.

    Raises:
        TaskError: for an unknown field (listing those there are), a value of the wrong type, or a
            class whose fields are none because it is not decorated.
    """
    own = vars(task_class)
    bare = [n for n, hint in own.get("__annotations__", {}).items() if "ClassVar" not in str(hint)]
    if bare and "__dataclass_params__" not in own:
        raise TaskError(
            f"{task_class.__name__} has fields ({', '.join(bare)}) but is no dataclass. "
            f"Write @dataclass above class {task_class.__name__}."
        )
    hints = typing.get_type_hints(task_class)
    fields = {f.name: f for f in dataclasses.fields(task_class) if f.init}
    converted = {}
    for name, value in values.items():
        if name not in fields:
            there = ", ".join(fields) or "none"
            raise TaskError(f"{task_class.__name__} has no field {name!r}. Its fields: {there}.")
        converted[name] = _convert(value, hints[name], f"{task_class.__name__}.{name}")
    try:
        return task_class(**converted)
    except TypeError as error:
        raise TaskError(
            f"{task_class.__name__} cannot be built: {error}. Give the missing fields with --set NAME=VALUE."
        ) from error


def parse_assignments(assignments: Iterable[str]) -> dict[str, str]:
    """Turn ``field=value`` strings into a dict; the last one wins.

    Raises:
        TaskError: an entry has no ``=``.
    """
    values = {}
    for entry in assignments:
        name, separator, value = entry.partition("=")
        if not separator or not name.strip():
            raise TaskError(f"--set {entry!r}: write it as field=value, for example --set lr=0.1.")
        values[name.strip()] = value.strip()
    return values


def task_fields(task: Task) -> dict[str, Any]:
    """The values of a task's fields, as JSON types.

    Raises:
        TaskError: a field's value has no JSON form, so it could not be recorded.
    """
    values = {f.name: getattr(task, f.name) for f in dataclasses.fields(task) if f.init}
    for name, value in values.items():
        try:
            json.dumps(value)
        except TypeError:
            raise TaskError(
                f"{type(task).__name__}.{name} is a {type(value).__name__}; fields must be numbers, strings, "
                "booleans, None, or lists of them, so that the run can record them."
            ) from None
    return values


def task_assignments(task: Task) -> tuple[str, ...]:
    """The fields that differ from their defaults, as :func:`parse_assignments` takes them.

    Raises:
        TaskError: a field would be read as another value.
    """
    hints = typing.get_type_hints(type(task))
    defaults = {f.name: f.default for f in dataclasses.fields(task)}
    changed = {name: value for name, value in task_fields(task).items() if value != defaults[name]}
    for name, text in parse_assignments(f"{name}={value}" for name, value in changed.items()).items():
        where = f"{type(task).__name__}.{name}"
        read = _convert(text, hints[name], where)
        if isinstance(changed[name], str) and read != changed[name]:
            raise TaskError(
                f"{where} is {changed[name]!r}, which the job would be given as --set, and read as {read!r}. "
                "Choose a text that is no other value, and has no blanks at its ends."
            )
    return tuple(f"{name}={value}" for name, value in changed.items())


def _convert(value: Any, hint: Any, where: str) -> Any:
    """Convert a string from the command line, or a TOML value, to the annotated type."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    says_none = value is None or (isinstance(value, str) and value.lower() == "none")
    if says_none and (type(None) in options or hint is Any):
        return None
    for option in options:
        try:
            return _convert_to(value, option)
        except (ValueError, SyntaxError):
            continue
    wanted = " or ".join(getattr(o, "__name__", str(o)) for o in options)
    raise TaskError(f"{where} must be {wanted}, but {value!r} was given.")


def _convert_to(value: Any, kind: Any) -> Any:
    origin = typing.get_origin(kind) or kind
    if origin is typing.Literal:
        for choice in typing.get_args(kind):
            if value == choice or value == str(choice):
                return choice
        raise ValueError
    if origin is bool:
        if isinstance(value, bool):
            return value
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if str(value).lower() in words:
            return words[str(value).lower()]
        raise ValueError
    if origin is int:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError
        return int(value)
    if origin is float:
        if isinstance(value, bool):
            raise ValueError
        return float(value)
    if origin is str:
        return str(value)
    if origin in (list, tuple):
        items = ast.literal_eval(value) if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ValueError
        arguments = [a for a in typing.get_args(kind) if a is not Ellipsis]
        kinds = arguments if len(arguments) == len(items) else arguments[:1] * len(items)
        return (
            origin(_convert_to(i, k) for i, k in zip(items, kinds, strict=True)) if kinds else origin(items)
        )
    if kind is Any:
        return ast.literal_eval(value) if isinstance(value, str) else value
    raise ValueError
