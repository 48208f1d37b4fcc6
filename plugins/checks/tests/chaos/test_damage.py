"""Damage from outside is what it says, and a checkpoint that was written again is not taken for damaged."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from plugins.checks.tests.chaos import small_checkpoint

from paceline.runs.checkpoint_store import newest_verified
from paceline_checks import fault_injection

save = partial(small_checkpoint.save, files={"a.bin": bytes(300), "b.bin": b"\xff" * 70})


@pytest.mark.parametrize("harm", ["bitflip", "truncate"])
def test_whatever_is_chosen_the_checkpoint_does_not_verify(
    harm: Literal["bitflip", "truncate"], tmp_path: Path
) -> None:
    chosen = random.Random(3)
    for step in range(1, 40):
        path = save(tmp_path, step)
        assert newest_verified(tmp_path).path == path
        before = {file.name: file.read_bytes() for file in path.iterdir()}
        told = fault_injection.damage(path, harm, chosen.getrandbits(32))
        after = {file.name: file.read_bytes() for file in path.iterdir()}
        changed = [name for name in before if before[name] != after[name]]
        assert len(changed) == 1
        assert f"{path.name}/{changed[0]}" in told
        assert newest_verified(tmp_path).path != path


def test_the_newest_comes_first_and_damaged_ones_do_not_count(tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (9, 10, 100)]
    assert fault_injection.intact(tmp_path, ()) == paths[::-1]
    harmed = {fault_injection.identity(paths[2])}
    assert fault_injection.intact(tmp_path, harmed) == [paths[1], paths[0]]
    fault_injection.damage(paths[2], "truncate", 7)
    assert save(tmp_path, 100) == paths[2]  # moved aside, and written again
    assert fault_injection.intact(tmp_path, harmed) == paths[::-1]
