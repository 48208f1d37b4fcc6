"""The README and CONTRIBUTING say what is true of this repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def tree_paths() -> set[str]:
    """The paths in CONTRIBUTING's repository tree, whose indentation is two spaces a level."""
    block = re.search(r"```text\n(src/paceline/\n.*?)```", CONTRIBUTING, flags=re.DOTALL)
    assert block, "CONTRIBUTING.md has no repository tree"
    paths: set[str] = set()
    parents: list[str] = []
    for line in block[1].splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        parents[depth:] = [name]
        paths.add("".join(parents))
    return paths


def test_every_path_of_the_tree_exists() -> None:
    assert [path for path in sorted(tree_paths()) if not (ROOT / path).exists()] == []


def test_the_tree_names_every_part_of_the_package() -> None:
    package = ROOT / "src" / "paceline"
    parts = {
        f"src/paceline/{path.name}{'/' if path.is_dir() else ''}"
        for path in package.iterdir()
        if not path.name.startswith(("_", ".")) and path.name != "py.typed"
    }
    assert parts - tree_paths() == set()


def test_the_readme_fits_in_1500_words() -> None:
    assert len(README.split()) <= 1_500


def test_ci_runs_the_readmes_test_command() -> None:
    assert "make test" in README
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    commands = re.findall(r'^ *(?:make --no-print-directory|run_layer) ([^\s"]+)', run, flags=re.MULTILINE)
    # `make test` comes before packages that it does not install itself.
    torch_of_its_own = "VENV=.venv-torch-newest"
    assert commands == ["install-dev", "test", "system-packages", torch_of_its_own, "check", "test-systems"]
    assert 'make --no-print-directory "$1" ||' in run


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    local = [target for target in targets if "://" not in target]
    made = ROOT / "docs" / "reference" / "cli.md"  # when the site is built
    missing = [t for t in local if not (target := (page.parent / t).resolve()).exists() and target != made]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_number_is_left_to_be_filled_in(page: Path) -> None:
    assert re.findall(r"@@[^@\s]+@@", page.read_text(encoding="utf-8")) == []
