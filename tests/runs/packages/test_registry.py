"""Names, tags and digests mean one package; what they meant before can come back."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from tests.runs.packages.conftest import manifest_of, put_package

from paceline.core.errors import PackageError
from paceline.runs.checkpoint_manifest import write_file
from paceline.runs.package import open_package
from paceline.runs.package_registry import PackageReference, Registry, parse_reference, registry_path


@pytest.fixture
def two(registry: Registry) -> tuple[str, str]:
    """Two packages; ``demo@prod`` meant the first, and means the second."""
    digests = put_package(registry, seed=1), put_package(registry, seed=2)
    for digest in digests:
        registry.put_tag(PackageReference("demo", "prod"), digest)
    return digests


@pytest.fixture
def no_locks_on_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks on folders hold within one node of NFS, Lustre and CIFS only, so none may be relied on."""
    flock = fcntl.flock

    def flock_of_files(file: Any, operation: int) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        assert stat.S_ISREG(os.fstat(descriptor).st_mode), "the lock of a folder"
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        assert mode == os.O_RDWR or not operation & fcntl.LOCK_EX, "NFSv4 locks a file that can be written"
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_of_files)


@pytest.mark.usefixtures("no_locks_on_folders")
def test_each_change_is_locked_by_a_file(registry: Registry) -> None:
    digest = put_package(registry)
    reference = PackageReference("demo", "prod")
    registry.put_tag(reference, digest)
    with registry.unchanging():
        assert registry.resolve("demo@prod") == digest
    registry.remove_tag(reference)
    with registry.unchanging():
        registry.discard(digest)
    assert registry.digests() == []
    assert sorted(path.name for path in registry.path.iterdir()) == ["lock", "packages", "tags"]


def test_a_draft_from_which_something_is_missing_is_not_published(registry: Registry) -> None:
    with registry.draft() as draft:
        files = {name: write_file(draft / name, [b"content"]) for name in ("README.md", "weights.safetensors")}
        (draft / "README.md").unlink()
        with pytest.raises(PackageError, match=r"another program has removed or changed README\.md"):
            registry.commit(draft, manifest_of(files=files))
    assert registry.digests() == []


def test_every_way_to_name_a_package(registry: Registry, two: tuple[str, str]) -> None:
    first, second = two
    registry.put_tag(parse_reference("demo"), first)
    assert registry.resolve("demo@prod") == second
    assert registry.resolve("demo") == registry.resolve("demo@latest") == first
    assert registry.resolve(second) == registry.resolve(second[:8]) == second
    assert registry.resolve(f"sha256:{second}") == second
    assert open_package("demo@prod", registry).path == registry.path_of(second)


def test_a_tag_goes_back_once_for_each_change(registry: Registry, two: tuple[str, str]) -> None:
    first, second = two
    reference = PackageReference("demo", "prod")
    before, now = registry.roll_back(reference)
    assert (before.digest, now.digest) == (second, first)
    assert registry.resolve("demo@prod") == first
    with pytest.raises(PackageError, match="to a previous package: it has none"):
        registry.roll_back(reference)
    assert registry.holds(second), "a rollback removes no package"


def test_the_same_tag_again_changes_nothing(registry: Registry, two: tuple[str, str]) -> None:
    reference = PackageReference("demo", "prod")
    before = registry.find(reference)
    assert registry.put_tag(reference, two[1]) == before == registry.find(reference)


def test_a_tag_is_forgotten_and_its_package_stays(registry: Registry, two: tuple[str, str]) -> None:
    registry.remove_tag(PackageReference("demo", "prod"))
    assert registry.references() == {}
    assert registry.holds(two[1])
    assert not (registry.tags / "demo").exists()
    with pytest.raises(PackageError, match="there is no demo@prod"):
        registry.remove_tag(PackageReference("demo", "prod"))


def test_only_what_is_there_is_tagged(registry: Registry) -> None:
    with pytest.raises(PackageError, match="nothing to tag"):
        registry.put_tag(PackageReference("demo", "prod"), "0" * 64)
    assert registry.references() == {}


@pytest.mark.parametrize("text", ["../x", "Demo", "demo@", "demo@../x", "demo@a@b", "", "@prod", "a/b", ".a"])
def test_names_that_could_be_paths_are_refused(registry: Registry, text: str) -> None:
    with pytest.raises(PackageError, match="lower-case letters"):
        registry.resolve(text)


def test_what_is_not_there_is_named_with_what_is(registry: Registry, two: tuple[str, str]) -> None:
    with pytest.raises(PackageError, match=r"no demo@test .*; it has demo@prod\."):
        registry.resolve("demo@test")
    with pytest.raises(PackageError, match=r"no other@latest .*; it has demo@prod\."):
        registry.resolve("other")
    with pytest.raises(PackageError, match="is not a package's digest"):
        registry.resolve("f" * 64)


def test_a_damaged_tag_is_refused(registry: Registry, two: tuple[str, str]) -> None:
    file = registry.tags / "demo" / "prod.json"
    file.write_text('{"digest": "../../x", "earlier": []}')
    with pytest.raises(PackageError, match="is not a digest"):
        registry.resolve("demo@prod")
    file.write_text(f'{{"digest": "{two[0]}"}}')
    with pytest.raises(PackageError, match="earlier"):
        registry.resolve("demo@prod")


def test_a_draft_that_is_not_committed_leaves_nothing(registry: Registry) -> None:
    with registry.draft() as draft:
        (draft / "weights.safetensors").write_bytes(b"half")
        assert registry.digests() == []
    assert list(registry.packages.iterdir()) == []


def test_where_the_registry_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PACELINE_REGISTRY", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert registry_path() == tmp_path / "paceline" / "registry"
    monkeypatch.setenv("PACELINE_REGISTRY", str(tmp_path / "own"))
    assert registry_path() == tmp_path / "own"
