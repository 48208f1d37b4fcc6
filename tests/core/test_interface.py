"""All commands and options stand in a text file of the core, and in one of each plug-in: a new one shows in review."""

from __future__ import annotations

import importlib
import importlib.util
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from cyclopts import App

from paceline.cli import app
from paceline.core.built_in import BUILT_IN, COMMANDS
from paceline.core.config import all_options
from paceline.core.options import flag
from paceline.core.plugins import GROUP_OF_TYPE
from paceline.launch.launcher import option_names
from paceline_own_loop.run import OF_LAUNCHERS, OF_STEPS, OF_TASKS, OF_WRAPPERS

ROOT = Path(__file__).parents[2]


def commands_of(group: App, path: tuple[str, ...]) -> Iterator[tuple[str, set[str]]]:
    """Yield each command with its options and arguments."""
    if group.default_command is not None:
        names = {argument.name for argument in group.assemble_argument_collection()} - {"*"}
        yield " ".join(path), names
    for name in group:
        if not name.startswith("-"):
            yield from commands_of(group[name], (*path, name))


def interfaces() -> dict[str, str]:
    """Return the text of each package."""
    texts: defaultdict[str, list[str]] = defaultdict(list)
    run_options = set(map(flag, all_options()))
    texts["paceline"] = ["options of a run:", *(f"  {name}" for name in sorted(run_options)), ""]
    of_launchers: set[str] = set()
    for name, reference in BUILT_IN["paceline.launchers"].items():
        own = set(map(flag, option_names(name)))
        of_launchers |= own
        texts[reference.partition(".")[0]] += [f"--on {name}: {' '.join(sorted(own))}".rstrip(": ")]
    for name, command in COMMANDS.items():
        for words, options in commands_of(app[name], (name,)):
            kinds = []
            if {"--strategy", "--seed"} <= options:
                kinds, options = ["RUN OPTIONS"], options - run_options
            if "--cpus-per-task" in options:  # a job's; of launchers a command has only those that argv asks for
                kinds, options = [*kinds, "LAUNCHER OPTIONS"], options - of_launchers
            line = f"paceline {words}: {' '.join([*kinds, *sorted(options)])}"
            texts[command.reference.partition(".")[0]].append(line)
    return {package: "\n".join(lines) + "\n" for package, lines in texts.items()}


def test_commands_and_options_are_those_of_the_files(golden: Callable[[Path, str], None]) -> None:
    for package, text in interfaces().items():
        importlib.import_module(package)
        folder = ROOT / "src" if package == "paceline" else ROOT / "plugins" / package.removeprefix("paceline_")
        golden(folder / "interface.txt", text)


HEAD = '''"""The options of a run as types of keywords, which tests/core/test_interface.py writes from their groups."""

from __future__ import annotations

from os import PathLike
from typing import Literal, TypedDict

Texts = str | list[str] | tuple[str, ...]
'''
PATHS = {"backup_to", "init_from", "run_dir"}
NOT_OF_RUN = {"global_batch_size", "run_dir", *OF_LAUNCHERS, *OF_STEPS, *OF_TASKS, *OF_WRAPPERS}


def type_of(hint: Any) -> str:
    """Return the type of a keyword as text; names that other distributions add are any text."""
    if typing.get_origin(hint) is Literal:
        return f"Literal[{', '.join(map(repr, typing.get_args(hint)))}]".replace("'", '"')
    if typing.get_origin(hint) is tuple:
        return "Texts"
    parts = typing.get_args(hint)
    if set(parts) & GROUP_OF_TYPE.keys():
        return "str"
    return " | ".join(map(type_of, parts)) if parts else "None" if hint is type(None) else str(hint.__name__)


def keywords() -> str:
    """Return the module of the types of keywords."""
    loop, others = [], []
    for name, its in all_options().items():
        if name not in ("task", "set", "on"):
            of_run = name in NOT_OF_RUN or its.group == "Fine-tuning"
            (others if of_run else loop).append(
                f"    {name}: {'PathLike[str] | ' if name in PATHS else ''}{type_of(its.type)}\n"
            )
    classes = (
        f'class LoopOptions(TypedDict, total=False):\n    """Those of :class:`paceline.Run`."""\n\n{"".join(loop)}',
        f'class TaskOptions(LoopOptions, total=False):\n    """Those of a task."""\n\n{"".join(others)}',
        'class RunOptions(TaskOptions, total=False):\n    """Those of :func:`paceline.fit`."""\n\n    on: str\n',
    )
    return "\n".join([HEAD, *classes])


def test_the_keywords_of_fit_and_run_are_the_options(golden: Callable[[Path, str], None]) -> None:
    golden(ROOT / "src" / "paceline" / "core" / "run_options.pyi", keywords())


SUBMIT_HEAD = '''"""The options of ``paceline.submit`` as types, which tests/core/test_interface.py writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from paceline.core.option_groups import RankLauncher
from paceline.core.run_options import TaskOptions, Texts

class SubmitOptions(TypedDict, total=False):
    """Those of :func:`paceline.submit` and :func:`paceline.submit_array` for all work."""

    name: str | None
    cpus_per_task: int | None
    gpus_per_node: int | None
'''
SUBMIT_TAIL = '''
class FunctionJobOptions(SubmitOptions, total=False):
    """Those of functions."""

    nodes: int
    nproc: int
    walltime: str | None

class TaskJobOptions(SubmitOptions, TaskOptions, total=False):
    """Those of tasks."""

    rank_launcher: RankLauncher
    env: Mapping[str, str]
'''


def test_the_keywords_of_submit_are_the_options(golden: Callable[[Path, str], None]) -> None:
    from paceline_frameworks.submitit import SubmititOptions

    hints = typing.get_type_hints(SubmititOptions)
    own = "".join(f"    {name}: {type_of(hint)}\n" for name, hint in hints.items() if name != "executor")
    folder = ROOT / "plugins" / "frameworks" / "src" / "paceline_frameworks"
    golden(folder / "submit_options.pyi", SUBMIT_HEAD + own + SUBMIT_TAIL)


def test_the_reference_of_options_is_that_of_the_code(golden: Callable[[Path, str], None]) -> None:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "scripts" / "docs_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    golden(ROOT / "docs" / "reference" / "options.md", hooks.options_page())
