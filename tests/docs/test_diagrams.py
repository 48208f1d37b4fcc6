"""The pictures of the strategies are those that the script draws."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_pictures_are_drawn_by_the_script(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("diagrams", ROOT / "scripts" / "strategy_diagrams.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    # Its dataclasses look their module up.
    sys.modules["diagrams"] = script
    spec.loader.exec_module(script)
    script.write(tmp_path)
    drawn = sorted(tmp_path.iterdir())
    assert drawn
    for picture in drawn:
        kept = ROOT / "docs" / "images" / picture.name
        assert kept.read_text() == picture.read_text(), f"run scripts/strategy_diagrams.py: {kept}"
