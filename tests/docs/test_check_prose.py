"""The checker of prose finds the phrases that hide the meaning, and nothing in code, names and quotations."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_prose", ROOT / "scripts" / "check_prose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclass looks its module up.
    sys.modules["check_prose"] = module
    spec.loader.exec_module(module)
    return module


def found(checker: ModuleType, tmp_path: Path, text: str, name: str = "page.md") -> list[tuple[int, str]]:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return [(finding.line, finding.phrase) for finding in checker.check(path)]


@pytest.mark.parametrize(
    ("bad", "phrase", "good"),
    [
        (
            "Training goes on when processes, machines, disks or networks fail.",
            "goes on",
            "Training survives process, node, disk and network failures.",
        ),
        (
            "What is recovered depends on who starts the processes.",
            "who",
            "Recovery depends on the launcher.",
        ),
        (
            "a swap of packages: what may be removed: nothing that is tagged, at work, or that something came from.",
            "at work",
            "It lists what can be deleted. Tagged, running, or still-referenced artifacts are never removed.",
        ),
        (
            "Two ranks that both insist cannot be told apart, and the job ends",
            "told",
            "With only two ranks there is no majority, so the job is aborted",
        ),
        (
            "Who does not reach the directory does not get it; on a full disk nobody gets it",
            "nobody",
            "A node that cannot reach the directory cannot acquire it. If the disk is full, no node can",
        ),
        (
            "0 where everything passed or is only worth a look at",
            "look at",
            "0 if all checks pass or only produce warnings",
        ),
        (
            "a search that was killed is gone on with in the same way",
            "gone on",
            "resume a killed search the same way",
        ),
        (
            "How long a step may take before whoever holds it up is named",
            "holds it up",
            "Step timeout. The rank that blocks the step is reported and replaced",
        ),
        (
            "python3.9 is no program that can be run.",
            "is no program",
            "python3.9: command not found or not executable.",
        ),
        (
            "It is made up for with the next checkpoint.",
            "made up for",
            "The backup will be retried with the next checkpoint.",
        ),
        ("new: nothing of a search is to be there.", "is to be", "new: require an empty directory."),
        ("A node that is sent home may join anew.", "anew", "A rejected node may join again."),
        (
            "The lease goes to one side.",
            "lease",
            "One side acquires the quorum witness; a Kubernetes Lease is another thing.",
        ),
        (
            "The culprit is replaced, its victims stay.",
            "culprit",
            "The root-cause rank is replaced; the blocked ranks stay.",
        ),
    ],
)
def test_cryptic_phrases_are_found_and_natural_ones_are_not(
    checker: ModuleType, tmp_path: Path, bad: str, phrase: str, good: str
) -> None:
    assert phrase in [words for _, words in found(checker, tmp_path, bad)]
    assert found(checker, tmp_path, good) == []


@pytest.mark.parametrize(
    "text",
    [
        "It is for people who know PyTorch, and for anyone who runs Slurm.",
        "There is no majority, and the job is no longer running; if there is none, it waits.",
        "The aim is to reduce the traffic, and the next one is to the right.",
        "Results of He et al. (2016); see [the page](recovery.md#who-goes-on).",
        "Run `paceline goes on`, or ``who``: nothing here is prose.",
        'The message is "nobody goes on", and “whoever” is quoted.',
        "```text\nnobody goes on\n```\n\n<!-- not run: nobody goes on -->\n",
        "| `at work` | running |\n|---|---|\n| x goes | on |\n",
        "The first goes.\n\nOn two processes it runs.",
    ],
)
def test_code_quotations_names_and_ordinary_english_are_left_alone(
    checker: ModuleType, tmp_path: Path, text: str
) -> None:
    assert found(checker, tmp_path, text) == []


def test_a_phrase_may_run_over_the_end_of_a_line(checker: ModuleType, tmp_path: Path) -> None:
    assert found(checker, tmp_path, "# Page\n\nThe run goes\non, with its bits.\n") == [(3, "goes on")]


def test_docstrings_comments_and_messages_of_python_are_prose(checker: ModuleType, tmp_path: Path) -> None:
    source = '''"""Nobody reads this."""

name = "nobody"
number = 1  # whoever counts
# The loop goes
# on here.


def beside(told):
    """Let go of ``whoever`` and of `nobody`."""
    raise ValueError(
        f"{told.whoever} is left: the others are told "
        "to wait; it goes "
        f"on with {beside}."
    )


table = {"goes": "on", "who": b"nobody is anew here"}
'''
    assert found(checker, tmp_path, source, "module.py") == [
        (1, "Nobody"),
        (4, "whoever"),
        (5, "goes on"),
        (10, "Let go"),
        (12, "told"),
        (13, "goes on"),
    ]


def test_findings_are_printed_with_file_line_and_suggestion(
    checker: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("One.\n\nIt goes on.\n", encoding="utf-8")
    assert checker.main([str(page)]) == 1
    assert capsys.readouterr().out == f"{page}:3: goes on -> continue\n"
    page.write_text("It continues.\n", encoding="utf-8")
    assert checker.main([str(page)]) == 0
    assert capsys.readouterr().out == ""


def test_the_files_come_from_pyproject(checker: ModuleType, tmp_path: Path) -> None:
    for name in ("a.md", "docs/b.md", "docs/deep/c.md", "src/d.py", "src/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def configure(**settings: Any) -> None:
        lines = [f"{key} = {value!r}" for key, value in settings.items()]
        (tmp_path / "pyproject.toml").write_text("\n".join(["[tool.paceline.prose]", *lines]), encoding="utf-8")

    configure(pages=["*.md", "docs/**/*.md"], code=["src/*.py"], exclude=["src/e.py"])
    names = [str(path.relative_to(tmp_path)) for path in checker.configured_files(tmp_path)]
    assert names == ["a.md", "docs/b.md", "docs/deep/c.md", "src/d.py"]
    configure(pages=["*.md"], code=["lib/*.py"], exclude=[])
    with pytest.raises(SystemExit, match=r"'lib/\*.py' matches no file"):
        checker.configured_files(tmp_path)
