"""The code blocks of the README and the documentation, run as a reader would run them.

All blocks of a page are run in order, in one empty directory:

- ``python``: a program, run by itself;
- ``python title="file.py"``, ``yaml title="file.yaml"``: a file, written where the blocks after it find it;
- ``diff title="before.py after.py"``: two whole files, written in the same way;
- ``console``: every line that starts with ``$`` is a command that must succeed; the other lines
  show its output and are not compared;
- ``toml`` and ``json`` must parse; ``text`` is not code.

A block that is not run says so, and why, in a comment on the line above it::

    <!-- not run: needs two machines -->

One whose ``paceline train`` commands are a further example of what tests run says so, and they are run with
``--dry-run``: their options are checked, and what they would start is rendered.

    <!-- dry run: a further strategy -->
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TIME_LIMIT_S = 240
LONG = (
    *(
        "adapters",
        "bench-comm",
        "communication",
        "export",
        "fine-tuning",
        "hydra",
        "maintenance",
        "parameter-server",
        "pipedream",
        "pipeline",
        "plan",
        "preemption",
        "quickstart",
        "report",
    ),
    *("running", "sharding", "tensor-parallel", "coming-from/accelerate", "coming-from/lightning"),
    *(
        "coming-from/fabric",
        "coming-from/torchrun",
        "launchers/mpi",
        "launchers/ray",
        "launchers/monarch",
        "launchers/submitit",
    ),
)
"""Pages that train for longer; other tests do what they show, too."""


def _marks(page: Path) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if page in [ROOT / "docs" / f"{name}.md" for name in LONG] else []


@dataclass(frozen=True)
class Block:
    """A fenced code block: where it stands, what its fence says, and what is in it."""

    line: int
    language: str
    title: str | None
    not_run: str | None
    dry_run: str | None
    text: str


def code_blocks(markdown: str) -> list[Block]:
    """The fenced blocks of a page, also those that are indented, in order."""
    blocks: list[Block] = []
    lines = markdown.splitlines()
    number = 0
    while number < len(lines):
        fence = re.fullmatch(r"(\s*)```(\S*)\s*(.*)", lines[number])
        if not fence:
            number += 1
            continue
        indent, language, info = fence.groups()
        end = lines.index(f"{indent}```", number + 1)
        above = lines[number - 1] if number else ""
        not_run = re.fullmatch(r"\s*<!-- not run: (.+) -->", above)
        dry_run = re.fullmatch(r"\s*<!-- dry run: (.+) -->", above)
        title = re.search(r'title="([^"]+)"', info)
        blocks.append(
            Block(
                line=number + 1,
                language=language,
                title=title[1] if title else None,
                not_run=not_run[1] if not_run else None,
                dry_run=dry_run[1] if dry_run else None,
                text="\n".join(line.removeprefix(indent) for line in lines[number + 1 : end]) + "\n",
            )
        )
        number = end + 1
    return blocks


def commands(console: str) -> list[str]:
    """Return the commands of a console block: those of several lines as one, and each turn of a loop by itself."""
    found = []
    for command in re.findall(r"^\$ ((?:.*\\\n)*.*)$", console, flags=re.MULTILINE):
        loop = re.fullmatch(r"for (\w+) in ([\w ]+); do ([^;&|]+); done", command)
        found += [command] if loop is None else [loop[3].replace(f"${loop[1]}", each) for each in loop[2].split()]
    return found


def words_of(command: str) -> list[str]:
    """What to start for a command: this interpreter where no shell is needed, which starts faster; else bash."""
    if not re.search(r"[|;&$<>`(){}*?~#]|^\w+=", command):
        match shlex.split(command.replace("\\\n", "")):
            case ["paceline", *arguments]:
                return [sys.executable, "-m", "paceline", *arguments]
            case ["python", *arguments]:
                return [sys.executable, *arguments]
    return ["bash", "-e", "-o", "pipefail", "-c", command]


def run(command: list[str], directory: Path) -> None:
    """Run a command where nothing but Paceline's own environment is on the path, and end all it started."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "XDG_STATE_HOME": str(directory / ".state"),
        "XDG_DATA_HOME": str(directory / ".data"),
        "XDG_CONFIG_HOME": str(directory / ".config"),
    }
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, f"{shlex.join(command)}\nexited with {process.returncode}:\n{output[-4000:]}"


def run_block(block: Block, directory: Path) -> None:
    match block.language:
        case "python" if block.title is not None:
            compile(block.text, block.title, "exec")
            (directory / block.title).write_text(block.text, encoding="utf-8")
        case "python":
            program = directory / f"block_{block.line}.py"
            program.write_text(block.text, encoding="utf-8")
            run([sys.executable, program.name], directory)
        case "diff" if block.title is not None:
            before, after = block.title.split()
            for name, left_out in ((before, "+"), (after, "-")):
                lines = [line[1:] for line in block.text.splitlines(keepends=True) if not line.startswith(left_out)]
                compile("".join(lines), name, "exec")
                (directory / name).write_text("".join(lines), encoding="utf-8")
        case "console":
            found = commands(block.text)
            assert found, "a console block without a command; use text for output alone"
            for command in found:
                if block.dry_run is not None:
                    assert command.startswith("paceline train "), "only training has a dry run here"
                    command += " --dry-run"
                run(words_of(command), directory)
        case "toml":
            tomllib.loads(block.text)
        case "yaml" if block.title is not None:
            yaml.safe_load(block.text)
            path = directory / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        case "json":
            json.loads(block.text)
        case "text" | "mermaid":
            pass
        case other:
            pytest.fail(f"a block is python, console, toml, yaml, json, mermaid or text, not {other!r}")


@pytest.mark.docs
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=_marks(page)) for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    for block in code_blocks(page.read_text(encoding="utf-8")):
        if block.not_run is None:
            try:
                run_block(block, tmp_path)
            except (AssertionError, ValueError, SyntaxError) as error:
                pytest.fail(f"{page.name}, the {block.language} block at line {block.line}:\n{error}")


def test_blocks_are_found_with_their_titles_and_reasons() -> None:
    page = """
```python title="a.py"
x = 1
```

1. indented

   <!-- not run: needs a GPU -->
   ```console
   $ first \\
       --second
   output
   $ third
   $ for w in 1 2; do fourth $w --at run-$w; done
   ```

<!-- dry run: a further strategy -->
```console
$ paceline train fashion-mnist --max-steps 0
```
"""
    titled, indented, further = code_blocks(page)
    assert (titled.dry_run, indented.dry_run, further.dry_run) == (None, None, "a further strategy")
    assert (titled.language, titled.title, titled.not_run, titled.text) == ("python", "a.py", None, "x = 1\n")
    assert (indented.language, indented.not_run, indented.line) == ("console", "needs a GPU", 9)
    assert commands(indented.text) == ["first \\\n    --second", "third", "fourth 1 --at run-1", "fourth 2 --at run-2"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "paceline train a.py:B \\\n    --lora 'rank=8'",
            [sys.executable, "-m", "paceline", "train", "a.py:B", "--lora", "rank=8"],
        ),
        ("python train.py --lr 1", [sys.executable, "train.py", "--lr", "1"]),
    ],
)
def test_a_command_that_needs_no_shell_is_started_without_one(command: str, words: list[str]) -> None:
    assert words_of(command) == words


@pytest.mark.parametrize("command", ["paceline train a | cat", "A=1 paceline runs", "ls", 'paceline "$HOME"', "pip x"])
def test_what_else_a_reader_types_is_run_by_bash(command: str) -> None:
    assert words_of(command) == ["bash", "-e", "-o", "pipefail", "-c", command]


@pytest.mark.integration
def test_a_dry_run_checks_options_and_trains_nothing(tmp_path: Path) -> None:
    def block(steps: int) -> Block:
        text = f"$ paceline train fashion-mnist --max-steps {steps} --run-dir run\n"
        return Block(line=1, language="console", title=None, not_run=None, dry_run="why", text=text)

    run_block(block(2), tmp_path)
    assert not (tmp_path / "run").exists()
    with pytest.raises(AssertionError, match="--max-steps must be"):
        run_block(block(-2), tmp_path)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("language", "text"),
    [("python", "raise SystemExit(3)\n"), ("console", "$ false\n"), ("toml", "a =\n"), ("bash", "ls\n")],
)
def test_a_block_that_does_not_work_is_a_failure(language: str, text: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        run_block(Block(line=1, language=language, title=None, not_run=None, dry_run=None, text=text), tmp_path)
