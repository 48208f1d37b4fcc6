"""Some cases of each target; ``make fuzz`` runs more."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from tests.fuzz.damage import ODD_VALUES, copy_tree, damage_json, damage_tree
from tests.fuzz.targets import TARGETS, World, read_registry, read_run, run_case, time_limit
from tests.fuzz.world import make_world
from tests.processes import Processes

CASES = 5
CONTENTS = {
    "nested": b"[" * 5000 + b"\n",
    "number": b'{"step": ' + b"9" * 5000 + b"}\n",
    "not text": b'{"event": "\x95\xff"}\n' * 3,
    "another type": b'["event", 1]\n',
    "no time": b'{"event": "started", "time": NaN}\n{"event": "started", "time": 1e300, "step": Infinity}\n',
    "empty": b"",
}


@pytest.fixture(scope="module")
def world(module_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(module_processes, tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("target", TARGETS)
def test_damaged_input_gets_an_answer_or_an_error(world: World, target: str) -> None:
    for seed in range(CASES):
        run_case(target, seed, world)


def test_damage_depends_on_its_seed_alone() -> None:
    document = {"rows": [{"age": 3, "name": "a"}], "more": {"nested": [1, 2]}}
    before = json.dumps(ODD_VALUES)
    damaged = [json.dumps(damage_json(random.Random(seed), document)) for seed in range(2000)]
    assert json.dumps(ODD_VALUES) == before
    assert damaged == [json.dumps(damage_json(random.Random(seed), document)) for seed in range(2000)]


@pytest.mark.parametrize("kind", [*CONTENTS, "fifo", "folder", "endless"])
def test_each_file_of_a_run_may_be_anything(world: World, kind: str) -> None:
    files = [path.relative_to(world.run) for path in sorted(world.run.rglob("*")) if path.is_file()]
    assert {"run.toml", "events.jsonl", "metrics.jsonl", "result.json"} <= set(map(str, files))
    for file in files:
        run = world.scratch / "runs" / "damaged"
        copy_tree(world.run, run)
        path = run / file
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "endless":
            path.symlink_to("/dev/zero")
        else:
            path.write_bytes(CONTENTS[kind])
        with time_limit():
            read_run(run)


@pytest.mark.parametrize("kind", ["fifo", "endless", *CONTENTS])
def test_each_file_of_a_registry_may_be_anything(world: World, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = world.scratch / "registry"
    monkeypatch.setenv("PACELINE_REGISTRY", str(registry))
    files = [path.relative_to(world.registry) for path in sorted(world.registry.rglob("*")) if path.is_file()]
    assert len(files) > 4
    for file in files:
        copy_tree(world.registry, registry)
        path = registry / file
        path.unlink()
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "endless":
            path.symlink_to("/dev/zero")
        else:
            path.write_bytes(CONTENTS[kind])
        with time_limit():
            read_registry()


def test_a_seed_decides_the_damage(tmp_path: Path) -> None:
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "a").write_bytes(bytes(range(200)))
    (tmp_path / "original" / "b.json").write_text(json.dumps({"a": [1, 2], "b": {"c": "d"}}))
    trees = []
    for name in ("one", "two"):
        copy_tree(tmp_path / "original", tmp_path / name)
        damage_tree(random.Random(3), tmp_path / name)
        trees.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir() if path.is_file()})
    assert trees[0] == trees[1]
    assert trees[0] != {path.name: path.read_bytes() for path in (tmp_path / "original").iterdir()}
    documents = [damage_json(random.Random(seed), {"a": [1, 2], "b": {"c": "d"}}) for seed in range(20)]
    assert len({repr(document) for document in documents}) > 10
