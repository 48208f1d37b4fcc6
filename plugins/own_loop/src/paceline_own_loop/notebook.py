"""A task of a notebook's cells as a file, which other processes can import."""

from __future__ import annotations

import ast
import linecache
import symtable
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from paceline.core.errors import TaskError


def write_task(kind: type, directory: Path) -> Path:
    """Write a class of a notebook, with all that it uses of the cells, to ``task.py`` in a folder; return the file.

    Imports stay imports, classes and functions of the cells are copied; numbers, texts, lists and dicts are written as
    they are now.

    Raises:
        TaskError: it uses another value of the cells.
    """
    cells = _Cells(vars(sys.modules["__main__"]))
    cells.add(kind.__name__)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "task.py"
    parts = ("from __future__ import annotations\n" * cells.is_lazy, *sorted(cells.imports), "\n", *cells.definitions)
    path.write_text(f'"""Written by Paceline from the cells of a notebook."""\n\n{"".join(parts)}', encoding="utf-8")
    return path


class _Cells:
    """Collects definitions, each after those that it uses.

    Attributes:
        imports, definitions: lines of code.
        is_lazy: whether the cells evaluate no annotations.
    """

    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names
        self._known: set[str] = set()
        self.imports: set[str] = set()
        self.definitions: list[str] = []
        self.is_lazy = "annotations" in names

    def add(self, name: str) -> None:
        """Add what a name of the cells stands for, if it is one."""
        if name in self._known or name not in self._names or name.startswith("__"):
            return
        self._known.add(name)
        value = self._names[name]
        own_name, module = getattr(value, "__qualname__", ""), getattr(value, "__module__", None)
        if isinstance(value, ModuleType):
            self.imports.add(f"import {value.__name__} as {name}\n")
        elif isinstance(value, type | FunctionType) and module == "__main__" and own_name == name:
            source = self._source(value, name)
            for used in _globals_of(symtable.symtable(source, name, "exec")):
                self.add(used)
            self.definitions.append(f"{source}\n\n\n")
        elif module not in (None, "__main__") and getattr(sys.modules.get(str(module)), own_name, None) is value:
            self.imports.add(f"from {module} import {own_name} as {name}\n")
        elif _is_literal(value):
            self.definitions.append(f"{name} = {value!r}\n")
        else:
            raise TaskError(
                f"the task uses {name} of the notebook's cells, a {type(value).__name__}, which other processes do not "
                "have. Build it within the task's methods, or give the task a field for it; or use nproc=1."
            )

    def _source(self, value: Any, name: str) -> str:
        """Return the code that defines a class or function, in the cell that has done so."""
        functions = (value,) if isinstance(value, FunctionType) else tuple(vars(value).values())
        files = [each.__code__.co_filename for each in functions if isinstance(each, FunctionType)]
        cells = ["".join(linecache.getlines(file)) for file in files] + list(reversed(self._names.get("In", ())))
        for cell in cells:
            try:
                body = ast.parse(cell).body
            except SyntaxError:
                continue
            for node in reversed(body):
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                    return "\n".join(cell.splitlines()[first - 1 : node.end_lineno])
        raise TaskError(
            f"the task uses {name}, whose source is not known in this session, so that other processes cannot import "
            "it. Write it into a file and import it; or use nproc=1."
        )


def _is_literal(value: Any) -> bool:
    """Return whether Python reads the same value from how it prints it: numbers, texts, lists and dicts of them."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False


def _globals_of(table: symtable.SymbolTable) -> Iterator[str]:
    """Return the names of a piece of code that it does not define itself."""
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module"):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _globals_of(child)
