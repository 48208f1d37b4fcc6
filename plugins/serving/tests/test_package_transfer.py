"""Copies between registries: verified whole before anything is visible."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.runs.packages.conftest import put_package

from paceline.core.errors import ConfigError, PackageError
from paceline.runs.package import open_package
from paceline.runs.package_registry import PackageReference
from paceline_serving.registry_command import PackageDirectory as Registry
from paceline_serving.registry_command import PackageLocation, copy_package, open_location

SIZE = 1_500_000


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """An empty one."""
    return Registry(tmp_path / "registry")


@pytest.fixture
def origin(tmp_path: Path) -> tuple[Registry, str]:
    """A registry with ``demo@prod``, whose files are larger than a piece."""
    origin = Registry(tmp_path / "origin")
    digest = put_package(origin, seed=7, size=SIZE)
    origin.put_tag(PackageReference("demo", "prod"), digest)
    return origin, digest


def test_a_copy_brings_package_and_tag(registry: Registry, origin: tuple[Registry, str], tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    copied = copy_package("demo@prod", origin[0], registry, lambda done, total: told.append((done, total)))
    opened = open_package("demo@prod", registry)
    assert opened.digest == copied.digest == origin[1]
    assert copied.copied_bytes == opened.manifest.size_bytes
    assert told[-1] == (opened.manifest.size_bytes, opened.manifest.size_bytes)
    assert copy_package("demo@prod", origin[0], registry).copied_bytes == 0, "it is there already"
    assert copy_package(origin[1][:12], registry, Registry(tmp_path / "other")).reference is None
    assert Registry(tmp_path / "other").digests() == [origin[1]]


def test_a_copy_that_broke_off_is_not_visible_and_leaves_nothing(
    registry: Registry, origin: tuple[Registry, str]
) -> None:
    def interrupt(done: int, total: int) -> None:
        assert registry.digests() == []
        if done > SIZE + 100_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_package("demo@prod", origin[0], registry, interrupt)
    assert list(registry.packages.iterdir()) == []
    assert registry.references() == {}


@pytest.mark.parametrize("name", ["weights.safetensors", "manifest.json"])
def test_a_damaged_origin_gives_nothing(registry: Registry, origin: tuple[Registry, str], name: str) -> None:
    file = origin[0].path_of(origin[1]) / name
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)
    with pytest.raises(PackageError, match="damaged"):
        copy_package("demo@prod", origin[0], registry)
    assert registry.digests() == []
    assert registry.references() == {}


def _damage(package: Path, how: str) -> None:
    file = package / "weights.safetensors"
    if how == "no manifest":
        (package / "manifest.json").unlink()
    elif how == "another package":
        shutil.rmtree(package)
        shutil.copytree(package.with_name(how), package)
    else:
        content = bytearray(file.read_bytes())
        content[-20] ^= 1
        file.write_bytes(content)


@pytest.mark.parametrize("how", ["a byte", "no manifest", "another package"])
def test_a_package_that_is_damaged_here_is_repaired_by_a_copy(
    registry: Registry, origin: tuple[Registry, str], how: str
) -> None:
    copy_package("demo@prod", origin[0], registry)
    package = registry.path_of(origin[1])
    registry.path_of(put_package(registry, seed=8)).rename(package.with_name("another package"))
    _damage(package, how)
    with pytest.raises(PackageError, match=r"pull it from an intact registry|is not in"):
        open_package("demo@prod", registry)
    pulled = copy_package("demo@prod", origin[0], registry)
    assert pulled.copied_bytes == open_package("demo@prod", registry).manifest.size_bytes
    assert sorted(os.listdir(registry.packages)) == sorted([origin[1], "another package"])


def test_a_damaged_package_stays_where_none_is_whole(registry: Registry, origin: tuple[Registry, str]) -> None:
    copy_package("demo@prod", origin[0], registry)
    for each in (registry, origin[0]):
        _damage(each.path_of(origin[1]), "a byte")
    with pytest.raises(PackageError, match="is damaged at the source"):
        copy_package("demo@prod", origin[0], registry)
    assert registry.holds(origin[1])


def test_a_longer_file_is_cut_off(registry: Registry, origin: tuple[Registry, str]) -> None:
    with (origin[0].path_of(origin[1]) / "program.pt2").open("ab") as file:
        file.write(b"more")
    with pytest.raises(PackageError, match="damaged"):
        copy_package("demo@prod", origin[0], registry)


@pytest.fixture
def store(tmp_path: Path) -> PackageLocation:
    """A registry in an object store, whose objects are files."""
    return open_location(f"file://{tmp_path}/store")


def test_a_package_goes_to_an_object_store_and_comes_back(
    registry: Registry, origin: tuple[Registry, str], store: PackageLocation
) -> None:
    sent = copy_package("demo@prod", origin[0], store)
    assert sent.copied_bytes == open_package(origin[0].path_of(origin[1])).manifest.size_bytes
    assert copy_package("demo@prod", origin[0], store).copied_bytes == 0, "it is there already"
    copy_package("demo@prod", store, registry)
    assert open_package("demo@prod", registry).digest == origin[1]
    with pytest.raises(PackageError, match=r"no demo@other .* it has demo@prod"):
        store.resolve("demo@other")
    assert store.resolve(origin[1][:12]) == origin[1]


def test_a_tag_in_an_object_store_knows_the_package_before(
    registry: Registry, origin: tuple[Registry, str], store: PackageLocation
) -> None:
    copy_package("demo@prod", origin[0], store)
    newer = put_package(origin[0], seed=8)
    origin[0].put_tag(PackageReference("demo", "prod"), newer)
    copy_package("demo@prod", origin[0], store)
    before = store.put_tag(PackageReference("demo", "prod"), newer)
    assert before is not None
    assert (before.digest, before.earlier) == (newer, (origin[1],))


def test_a_package_is_in_an_object_store_once_all_its_files_are(
    registry: Registry, origin: tuple[Registry, str], store: PackageLocation, tmp_path: Path
) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_package("demo@prod", origin[0], store, interrupt)
    with pytest.raises(PackageError, match="there is no demo@prod"):
        copy_package("demo@prod", store, registry)
    copy_package("demo@prod", origin[0], store)
    weights = tmp_path / "store" / "packages" / origin[1] / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(PackageError, match="damaged at the source"):
        copy_package("demo@prod", store, registry)
    assert registry.digests() == []
    weights.write_bytes(weights.read_bytes()[:-1])
    assert copy_package("demo@prod", origin[0], store).copied_bytes > 0, "a file that was cut is written again"
    copy_package("demo@prod", store, registry)


def test_an_address_with_a_password_is_refused() -> None:
    with pytest.raises(ConfigError, match="without a password"):
        open_location("s3://me:secret@bucket/registry")
