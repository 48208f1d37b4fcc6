"""Design decisions, which the site leaves out, stay short; their list has each of them, and their links work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DECISIONS = Path(__file__).parents[2] / "docs" / "decisions"
PAGES = sorted(DECISIONS.glob("*.md"))
MAX_WORDS = 600


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_decision_is_short_and_its_links_work(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^()\s#]+)(?:#[\w-]+)?\)", text)
    assert [link for link in links if not (DECISIONS / link).exists()] == []
    assert len(text.split()) <= MAX_WORDS


def test_the_list_has_each_decision_once() -> None:
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (DECISIONS / "index.md").read_text(encoding="utf-8"))
    assert sorted(listed) == [page.name for page in PAGES if page.name != "index.md"]


def test_guides_link_to_no_decision() -> None:
    """The site's hook keeps the text of a link whose text is code, such as `docs/decisions/`."""
    guides = [page for page in DECISIONS.parent.rglob("*.md") if page.parent != DECISIONS]
    linking = [page.name for page in guides if re.search(r"[^`]\]\((?:\.\./)*decisions/", page.read_text("utf-8"))]
    assert linking == []
