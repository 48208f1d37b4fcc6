"""Writes fail while they are armed, as a full or broken disk lets them fail, and not otherwise."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from plugins.checks.tests.chaos import small_checkpoint

from paceline.core.errors import PacelineError
from paceline.core.files import WRITE_FAULTS, fail_if_armed
from paceline.runs.checkpoint_store import newest_verified
from paceline_checks.fault_injection import WriteFaults

save = partial(small_checkpoint.save, files={"a.bin": b"content"})


@pytest.mark.parametrize(("kind", "number"), [("enospc", errno.ENOSPC), ("eio", errno.EIO)])
def test_saves_fail_until_they_are_disarmed(
    kind: Literal["enospc", "eio"], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = WriteFaults(tmp_path / "faults")
    for name, value in faults.environment.items():
        monkeypatch.setenv(name, value)
    first = save(tmp_path / "c", 1)
    faults.arm(kind)
    with pytest.raises(PacelineError, match="cannot save the checkpoint of step 2") as raised:
        save(tmp_path / "c", 2)
    assert isinstance(raised.value.__cause__, OSError)
    assert raised.value.__cause__.errno == number
    assert newest_verified(tmp_path / "c").path == first
    faults.disarm()
    faults.disarm()
    assert newest_verified(tmp_path / "c").path == first
    assert save(tmp_path / "c", 2).is_dir()


def test_without_the_variable_nothing_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WRITE_FAULTS, raising=False)
    faults = WriteFaults(tmp_path / "faults")
    faults.arm("eio")
    fail_if_armed(tmp_path / "x")
