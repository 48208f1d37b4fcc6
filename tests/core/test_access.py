"""Token files: closed to others, and never shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.core.access import create_token, read_token
from paceline.core.errors import ConfigError


def test_a_token_is_random_and_only_its_owners(tmp_path: Path) -> None:
    token = create_token(tmp_path / "one")
    assert len(token) == 32
    assert read_token(tmp_path / "one") == token
    assert (tmp_path / "one").stat().st_mode & 0o777 == 0o600
    assert create_token(tmp_path / "other") != token


def test_a_token_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = create_token(path)
    with pytest.raises(ConfigError, match="already exists"):
        create_token(path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="already exists"):
        create_token(link)
    assert read_token(path) == token


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o700, 0o666])
def test_a_token_that_others_might_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    create_token(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}, but must have 0600.*chmod 600"):
        read_token(path)


def test_a_token_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    create_token(path)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}, but this is user {owner + 1}"):
        read_token(path)


@pytest.mark.parametrize("change", [lambda t: t[:-2], lambda t: b"g" + t[1:], lambda t: t + b"0", lambda t: b""])
def test_a_damaged_token_is_refused_and_not_shown(tmp_path: Path, change: object) -> None:
    path = tmp_path / "token"
    token = create_token(path).hex()
    assert callable(change)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ConfigError, match="64 hexadecimal digits") as caught:
        read_token(path)
    assert token[1:10] not in str(caught.value)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_token(tmp_path / "token")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match="is not a regular file"):
            read_token(path)
