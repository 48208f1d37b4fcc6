"""Find a task by its name, import it, and build it from its recorded fields."""

from __future__ import annotations

import ast
import dataclasses
import datetime
import enum
import importlib
import importlib.util
import math
import multiprocessing
import os
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from paceline.core.built_in import BUILT_IN, PACKAGES, RECORDED_TASKS
from paceline.core.errors import TaskError
from paceline.core.plugins import Plugin, all_names, find_plugin, load, missing_part
from paceline.core.task import Task

# --- The values of a task's fields as JSON and as text: a run records them, and its processes read them again ---
#
# A value is written in the form that people would type (``"none"``, a path's text, an enum's name) if :func:`convert`
# reads exactly that value from it; otherwise in a form that names its type: ``{"$type": "str", "value": "none"}``.

_TYPE, _VALUE = "$type", "value"

_NAMED: dict[str, Callable[[Any], Any]] = {
    "none": lambda _: None,
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "path": Path,
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda seconds: datetime.timedelta(seconds=float(seconds)),
    "list": lambda items: [_read_named(item) for item in items],
    "tuple": lambda items: tuple(_read_named(item) for item in items),
    "set": lambda items: {_read_named(item) for item in items},
    "frozenset": lambda items: frozenset(_read_named(item) for item in items),
    "dict": lambda items: {_read_named(key): _read_named(item) for key, item in items},
}
"""How a value is read that is written with the name of its type."""


def encode(value: Any, hint: Any, where: str) -> Any:
    """Return a value as JSON, from which :func:`convert` reads the same value.

    Args:
        value: a number, text, boolean, None, path, date, time, duration, member of an enum or dataclass, or a list,
            tuple, set or dict of them.
        hint: the field's type.
        where: the name of the field, for the error.

    Raises:
        TaskError: a run cannot record it.
    """
    for write in (_write, _write_named):
        written = write(value, where)
        try:
            read = convert(written, hint, where)
        except (TaskError, TypeError):
            continue
        if is_same(value, read):
            return written
    raise _unrecordable(value, where)


def is_same(value: Any, other: Any) -> bool:
    """Return whether two values are equal, and of equal types throughout; NaN equals NaN."""
    if type(value) is not type(other) and not _is_number_of_type(value, type(other)):
        return False
    if isinstance(value, float) and math.isnan(value):
        return math.isnan(other)
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(is_same, value, other))
    if isinstance(value, Mapping):
        return is_same(list(value.items()), list(other.items()))
    if dataclasses.is_dataclass(value):
        return all(is_same(getattr(value, f.name), getattr(other, f.name)) for f in dataclasses.fields(value))
    return bool(value == other)


def _is_number_of_type(value: Any, kind: type) -> bool:
    """Return whether a value may stand for a number of another type: NumPy's float64 and an int for a float."""
    if isinstance(value, bool | enum.Enum):
        return False
    return isinstance(value, int | float) and (kind is float or (kind is int and isinstance(value, int)))


def _unrecordable(value: Any, where: str) -> TaskError:
    return TaskError(
        f"{where} is a {type(value).__name__}; fields must be numbers, strings, booleans, None, paths, dates, enums or "
        "dataclasses that their annotation names, or lists, tuples, sets and dicts of them, so that the run can record "
        "them."
    )


def _write(value: Any, where: str) -> Any:
    """Write a value as people would type it."""
    if value is None:
        return "none"
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, list | tuple):
        return [_write(item, where) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_write(item, where) for item in value), key=repr)
    if isinstance(value, Mapping):
        return {str(_write(key, where)): _write(item, where) for key, item in value.items()}
    if dataclasses.is_dataclass(value):
        hints = typing.get_type_hints(type(value))
        return {
            f.name: encode(getattr(value, f.name), hints[f.name], f"{where}.{f.name}")
            for f in dataclasses.fields(value)
            if f.init
        }
    raise _unrecordable(value, where)


def _write_named(value: Any, where: str) -> Any:
    """Write a value with the name of its type."""
    content = _write(value, where)
    name = "none" if value is None else "path" if isinstance(value, PurePath) else type(value).__name__
    if isinstance(value, list | tuple):
        content = [_write_named(item, where) for item in value]
    elif isinstance(value, set | frozenset):
        content = sorted((_write_named(item, where) for item in value), key=repr)
    elif isinstance(value, Mapping):
        content = [[_write_named(key, where), _write_named(item, where)] for key, item in value.items()]
    elif isinstance(value, float):
        name = "float"
    return {_TYPE: name, _VALUE: content}


def _read_named(written: Mapping[str, Any]) -> Any:
    return _NAMED[written[_TYPE]](written[_VALUE])


def convert(value: Any, hint: Any, where: str) -> Any:
    """Convert text from the command line, or what :func:`encode` wrote, to the annotated type.

    Args:
        where: the name of the field or option, for the error.

    Raises:
        TaskError: it is not such a value.
    """
    if isinstance(value, Mapping) and value.get(_TYPE) in _NAMED:
        return _read_named(value)
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    is_none = value is None or (isinstance(value, str) and value.lower() == "none")
    if is_none and (type(None) in options or hint is Any):
        return None
    for option in options:
        try:
            return _convert_to(value, option, where)
        except (ValueError, SyntaxError, TaskError):
            continue
    wanted = " or ".join(o.__name__ if isinstance(o, type) else str(o).removeprefix("typing.") for o in options)
    raise TaskError(f"{where} must be {wanted}, but {value!r} was given.")


def _convert_to(value: Any, kind: Any, where: str) -> Any:
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
        return float(value[:-1]) / 100 if isinstance(value, str) and value.endswith("%") else float(value)
    if origin is str:
        return str(value)
    if origin in (list, tuple, set, frozenset):
        items = ast.literal_eval(value) if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ValueError
        arguments = [a for a in typing.get_args(kind) if a is not Ellipsis]
        kinds = arguments if len(arguments) == len(items) else arguments[:1] * len(items)
        return origin(convert(i, k, where) for i, k in zip(items, kinds, strict=True)) if kinds else origin(items)
    if origin is dict:
        entries = ast.literal_eval(value) if isinstance(value, str) else value
        if not isinstance(entries, Mapping):
            raise ValueError
        if not typing.get_args(kind):
            return dict(entries)
        key, item = typing.get_args(kind)
        return {convert(k, key, where): convert(v, item, where) for k, v in entries.items()}
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return _enum_value(value, origin)
    if isinstance(origin, type) and issubclass(origin, PurePath):
        return origin(str(value))
    if origin in (datetime.datetime, datetime.date, datetime.time):
        return value if isinstance(value, origin) else origin.fromisoformat(str(value))
    if origin is datetime.timedelta:
        return datetime.timedelta(seconds=float(value))
    if dataclasses.is_dataclass(origin):
        return _build(value, origin, where)
    if kind is Any:
        return ast.literal_eval(value) if isinstance(value, str) else value
    raise ValueError


def _enum_value(value: Any, kind: type[enum.Enum]) -> enum.Enum:
    """Return the member of an enum by its name, or else by its value."""
    for choice in kind:
        if value in (choice.name, choice):
            return choice
    for choice in kind:
        if value in (choice.value, str(choice.value)):
            return choice
    raise ValueError


def _build(value: Any, kind: Any, where: str) -> Any:
    """Build a dataclass from the values of its fields."""
    entries = ast.literal_eval(value) if isinstance(value, str) else value
    hints = typing.get_type_hints(kind)
    if not isinstance(entries, Mapping) or not set(entries) <= {f.name for f in dataclasses.fields(kind) if f.init}:
        raise ValueError
    return kind(**{name: convert(item, hints[name], f"{where}.{name}") for name, item in entries.items()})


BUILT_IN_TASKS = BUILT_IN["paceline.tasks"]
"""Built-in tasks: name -> module:class."""


@dataclass(frozen=True)
class TaskReference:
    """A task by name, with the values of its fields.

    Attributes:
        spec: ``file.py:Name``, ``package.module:Name`` or a built-in task's name.
        fields: field name -> value, as :func:`task_fields` returns it, or as text.
    """

    spec: str
    fields: Mapping[str, Any]

    def load(self) -> Task:
        """Import the class and build the task.

        Raises:
            TaskError: the spec, the file or a field is wrong.
        """
        return build_task(load_task_class(self.spec), self.fields)


def check_spec(spec: str) -> tuple[str, str]:
    """Return the file or module of a task, and its class name, without importing it.

    Raises:
        TaskError: the spec is malformed, or its file does not exist.
    """
    module, name = split_spec(spec)
    if module.endswith(".py") and not Path(module).expanduser().is_file():
        raise TaskError(f"task {spec!r}: there is no file {Path(module).expanduser().resolve()}.")
    return module, name


def split_spec(spec: str) -> tuple[str, str]:
    """Split a spec into the file or module and the class name; the file need not exist.

    Raises:
        TaskError: the spec is malformed.
    """
    if not spec:
        raise TaskError("no task was given. Write paceline train TASK, where TASK is file.py:Name or a built-in task.")
    plugin = _find_plugin(spec)
    reference = plugin.reference if plugin else BUILT_IN_TASKS.get(spec) or RECORDED_TASKS.get(spec, spec)
    module, separator, name = reference.rpartition(":")
    if not separator or not module or not name:
        raise TaskError(
            f"task {spec!r} is not a built-in task and names no class.\n"
            f"  Write file.py:Name or package.module:Name, or one of the built-in tasks: "
            f"{', '.join(all_names('paceline.tasks'))}."
        )
    return module, name


def record_spec(spec: str) -> dict[str, str]:
    """Return what a run records to find its task again: a relative file needs the directory as well."""
    is_relative = _file_of(spec) is not None
    return {"spec": spec, **({"directory": str(Path.cwd())} if is_relative else {})}


def recorded_spec(record: Mapping[str, Any]) -> str:
    """Return the spec of a run's task, whose file may be relative to the directory in which the run was created."""
    spec = str(record["spec"])
    file = _file_of(spec)
    if file is None or file.is_file():
        return spec
    there = Path(str(record.get("directory", ""))) / file
    return f"{there}:{spec.rpartition(':')[2]}" if there.is_file() else spec


def _file_of(spec: str) -> Path | None:
    """Return the file of a spec if it is a relative path."""
    file = spec.rpartition(":")[0]
    path = Path(file).expanduser()
    return path if file.endswith(".py") and not path.is_absolute() else None


def load_task_class(spec: str) -> type[Task]:
    """Return the task class that ``spec`` names.

    Raises:
        TaskError: the module or class does not exist; the message lists the tasks of the module.
        ConfigError: the plug-in cannot be imported, or is not a task.
    """
    file_or_module, name = check_spec(spec)
    if _find_plugin(spec) is not None:
        requirement = "a dataclass that extends paceline.Task"
        return typing.cast(type[Task], load("paceline.tasks", spec, requirement, _is_task_class))
    loaded = (
        _import_file(Path(file_or_module), spec)
        if file_or_module.endswith(".py")
        else _import_module(file_or_module, spec)
    )
    loaded_class = getattr(loaded, name, None)
    if loaded_class is None and file_or_module == "__main__":
        file = f"{name.lower()}.py"
        raise TaskError(
            f"the task {name} was defined in a notebook's cell or an interactive session, which no other process can "
            f"import. Write the class into a file, such as {file}, and name it: --task {file}:{name}."
        )
    if loaded_class is None:
        tasks = [n for n, v in vars(loaded).items() if _is_task_class(v) and v.__module__ == loaded.__name__]
        hint = (
            f"It defines: {', '.join(tasks)}."
            if tasks
            else "It defines no task (a dataclass that extends paceline.Task)."
        )
        raise TaskError(f"{file_or_module} has no {name!r}. {hint}")
    if not _is_task_class(loaded_class):
        raise TaskError(f"{spec}: {name} is not a task; it must be a dataclass that extends paceline.Task.")
    return typing.cast(type[Task], loaded_class)


def _find_plugin(spec: str) -> Plugin | None:
    return None if ":" in spec or spec in BUILT_IN_TASKS else find_plugin("paceline.tasks", spec)


def _is_task_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Task) and value is not Task


def _import_module(name: str, spec: str) -> types.ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except SystemExit as error:
        raise TaskError(_exit_message(spec, error)) from error
    except ModuleNotFoundError as error:
        if error.name in PACKAGES:
            raise missing_part(error) from error
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise TaskError(
                f"task {spec!r}: there is no module {error.name!r} in the current directory or the environment."
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
    # Last: a file there called types.py or random.py must not replace a module of Python or of a library.
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.append(os.getcwd())
    _importing.append(spec)
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[module_name]
        if isinstance(error, SyntaxError):
            raise TaskError(_syntax_message(spec, error)) from error
        if isinstance(error, SystemExit):
            raise TaskError(_exit_message(spec, error)) from error
        if isinstance(error, ModuleNotFoundError):
            raise TaskError(f"task {spec!r}: {path.name} imports {error.name!r}, which is not installed.") from error
        if isinstance(error, ImportError) and "relative import" in str(error):
            raise TaskError(
                f"task {spec!r}: {path.name} has an import relative to its package, but a file that is given by its "
                f"path is in none. Name the module, such as {path.parent.name}.{path.stem}:{spec.rpartition(':')[2]} "
                "from the directory above, and start a script with python -m, or import by the absolute name."
            ) from error
        raise
    finally:
        _importing.pop()
    return module


_importing: list[str] = []


def name_in_session(*values: Any) -> str | None:
    """Return the first class or function of these values that no other process can import: one of a notebook's cell."""
    if getattr(sys.modules.get("__main__"), "__file__", None) is not None:
        return None
    for value in values:
        owner = getattr(value, "__self__", value)
        definition = owner if isinstance(owner, type | types.FunctionType) else type(owner)
        if definition.__module__ == "__main__":
            return str(definition.__qualname__)
    return None


def refuse_call_at_import(call: str) -> None:
    """Refuse a call by which a task's file would train while a process of a run imports it.

    Raises:
        TaskError: a task is being imported.
        SystemExit: this is a data worker, in which multiprocessing runs the script once more.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        print(
            f"paceline: the script calls {call} outside of if __name__ == '__main__':, and each data worker runs the "
            "script once more. Keep the call there, or use --num-workers 0 (num_workers=0).",
            file=sys.stderr,
            flush=True,
        )
        raise SystemExit(1)
    if _importing:
        raise TaskError(
            f"task {_importing[-1]!r}: the file calls {call} when it is imported, as each process of a run does. "
            "Keep the call under if __name__ == '__main__':."
        )


def _exit_message(spec: str, error: SystemExit) -> str:
    """Describe a file that ends the program that imports it, with the line that does."""
    frames = traceback.extract_tb(error.__traceback__)
    file = Path(spec.rpartition(":")[0]).name
    own = [frame for frame in frames if Path(frame.filename).name == file]
    where = f" (line {own[-1].lineno})" if own else ""
    return (
        f"task {spec!r}: the file ends the program when it is imported{where}, as sys.exit({error.code!r}) or argparse "
        "does. Each process of a run imports it: keep what only a script does under if __name__ == '__main__':."
    )


def _syntax_message(spec: str, error: SyntaxError) -> str:
    line = f"\n    {error.text.strip()}" if error.text else ""
    return f"task {spec!r}: syntax error in {error.filename}, line {error.lineno}: {error.msg}{line}"


def build_task(task_class: type[Task], values: Mapping[str, Any]) -> Task:
    """Build a task from field values; strings are converted to the field's type.

    ``model.width`` is a field of the dataclass that the field ``model`` has, by an earlier value or by default.

    Raises:
        TaskError: a field is unknown (lists the fields), a value has the wrong type, or the class lacks ``@dataclass``.
    """
    own = vars(task_class)
    bare = [n for n, hint in own.get("__annotations__", {}).items() if "ClassVar" not in str(hint)]
    if bare and "__dataclass_params__" not in own:
        raise TaskError(
            f"{task_class.__name__} has fields ({', '.join(bare)}) but is not a dataclass. "
            f"Write @dataclass above class {task_class.__name__}."
        )
    converted: dict[str, Any] = {}
    for name, value in values.items():
        first, *path = name.split(".")
        _set_field(task_class, converted, first, path, value)
    try:
        return task_class(**converted)
    except TypeError as error:
        raise TaskError(
            f"{task_class.__name__} cannot be built: {error}. Give the missing fields with --set NAME=VALUE."
        ) from error


def _set_field(kind: Any, converted: dict[str, Any], name: str, path: list[str], value: Any) -> None:
    """Convert a value of a dataclass's field, or of a field within the dataclass that it has now, or by default.

    Args:
        kind: the dataclass.
        converted: the values of its fields so far.
        path: the names from the field's value on.
    """
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
    where = f"{kind.__name__}.{name}"
    if name not in fields:
        names = ", ".join(fields) or "none"
        raise TaskError(f"{kind.__name__} has no field {name!r}. Its fields: {names}.")
    if not path:
        converted[name] = convert(value, typing.get_type_hints(kind)[name], where)
        return
    now = converted.get(name, _default(fields[name]))
    if not dataclasses.is_dataclass(now) or isinstance(now, type):
        raise TaskError(f"{where} has no field {path[0]!r}: its value is {now!r}. Give {where} itself.")
    inner: dict[str, Any] = {f.name: getattr(now, f.name) for f in dataclasses.fields(now) if f.init}
    _set_field(type(now), inner, path[0], path[1:], value)
    converted[name] = type(now)(**inner)


def _default(of: dataclasses.Field[Any]) -> Any:
    if of.default_factory is not dataclasses.MISSING:
        return of.default_factory()
    return None if of.default is dataclasses.MISSING else of.default


def field_type(kind: Any, name: str) -> Any:
    """Return the type of a dataclass's field, or of a nested one's (``model.width``); None: there is no such field."""
    first, _, rest = name.partition(".")
    if first not in {f.name for f in dataclasses.fields(kind) if f.init}:
        return None
    hint = typing.get_type_hints(kind)[first]
    if not rest:
        return hint
    nested = (option for option in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(option))
    return next((field_type(option, rest) for option in nested), None)


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
    """Return the values of a task's fields, as a run records them: :func:`build_task` builds an equal task from them.

    Raises:
        TaskError: a value cannot be recorded.
    """
    hints = typing.get_type_hints(type(task))
    return {
        f.name: encode(getattr(task, f.name), hints[f.name], f"{type(task).__name__}.{f.name}")
        for f in dataclasses.fields(task)
        if f.init
    }
