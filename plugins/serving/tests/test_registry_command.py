"""``paceline registry``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.runs.packages.conftest import put_package

from paceline.cli import main
from paceline.runs.package import open_package
from paceline.runs.package_registry import PackageReference, Registry


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    """Run ``paceline registry WORDS``; its exit code, and what it printed, or its error."""
    monkeypatch.setattr(sys, "argv", ["paceline", "registry", *words])
    code = main()
    said = capsys.readouterr()
    if code:
        return code, said.err
    return code, json.loads(said.out) if "--json" in words else said.out


def test_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    registry = Registry(tmp_path / "registry")
    first, second = put_package(registry, seed=1), put_package(registry, seed=2)
    for digest in (first, second):
        registry.put_tag(PackageReference("demo", "prod"), digest)
    monkeypatch.setenv("PACELINE_REGISTRY", str(registry.path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    code, rows = run(monkeypatch, capsys, "ls", "--json")
    assert code == 0
    assert {row["digest"]: row["tags"] for row in rows} == {first: [], second: ["demo@prod"]}
    assert not any(row["trusted"] for row in rows)
    code, table = run(monkeypatch, capsys, "ls")
    assert code == 0
    assert second[:12] in table
    assert "not trusted" in table
    assert run(monkeypatch, capsys, "show", "demo@prod", "--json")[1]["digest"] == second
    code, shown = run(monkeypatch, capsys, "show", "demo@prod")
    assert "tasks.py:Demo" in shown
    assert "not trusted" in shown
    tagged = run(monkeypatch, capsys, "tag", "demo@prod", "old", "--json")[1]
    assert tagged == {"reference": "demo@old", "digest": second, "before": None}
    back = run(monkeypatch, capsys, "rollback", "demo@prod", "--json")[1]
    assert back == {"reference": "demo@prod", "digest": first, "before": second}
    assert run(monkeypatch, capsys, "untag", "demo@old", "--json")[1]["before"] == second
    copied = run(monkeypatch, capsys, "push", "demo@prod", str(tmp_path / "other"), "--json")[1]
    assert open_package(Path(copied["package"])).digest == first
    assert run(monkeypatch, capsys, "show", "demo@old")[0] == 2
    (registry.path_of(second) / "program.pt2").write_bytes(b"x")
    code, error = run(monkeypatch, capsys, "tag", second[:12], "bad")
    assert code == 2
    assert "program.pt2 has 1 bytes" in error
