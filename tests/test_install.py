"""How Paceline is installed beside an existing torch, and what a run says without TensorBoard."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from paceline.core.plugins import install_command

ROOT = Path(__file__).parents[1]
TASK = f"{ROOT}/tests/training/tasks.py:Points"
FIND_PYTHON, SHARE_TORCH = ROOT / "scripts" / "find-python", ROOT / "scripts" / "share-torch"
TORCH = next(
    requirement
    for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    if (requirement := Requirement(text)).name == "torch"
)

WITHOUT_TENSORBOARD = """
import sys
sys.modules["tensorboard"] = None
from paceline.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    "version", ["2.11.0", "2.11.0a0+nv26.2", "2.12.1+cu130", "2.13.0+cpu", "2.14.1", "2.15.0", "3.0"]
)
def test_this_torch_stays_where_it_is_installed(version: str) -> None:
    assert TORCH.specifier.contains(version, prereleases=True)


@pytest.mark.parametrize("version", ["2.10.0", "2.10.2+cu130"])
def test_an_older_torch_is_replaced(version: str) -> None:
    assert not TORCH.specifier.contains(version, prereleases=True)


def environment_with_torch(path: Path, version: str) -> Path:
    """Make an environment with what looks like a release of torch; return its Python."""
    venv.create(path, with_pip=False, symlinks=True)
    packages = path / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    information = packages / f"torch-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return path / "bin" / "python"


def find(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([FIND_PYTHON, *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.integration
def test_a_python_with_its_own_torch_is_found(tmp_path: Path) -> None:
    python = environment_with_torch(tmp_path / "there", "2.12.0a0+nv26.2")
    found = find("--with-torch", python)
    assert (found.returncode, found.stdout.strip()) == (0, str(python))


@pytest.mark.integration
def test_a_torch_that_is_too_old_is_named(tmp_path: Path) -> None:
    python = environment_with_torch(tmp_path / "there", "2.10.1")
    found = find("--with-torch", python)
    assert (found.returncode, found.stdout) == (1, "")
    assert "no Python 3.11 or newer that has torch 2.11 or newer" in found.stderr
    assert re.search(rf"{re.escape(str(python))} .*Python 3\.\d+\.\d+, torch 2\.10\.1\n", found.stderr)


@pytest.mark.integration
def test_a_python_without_torch_is_named(tmp_path: Path) -> None:
    venv.create(tmp_path / "there", with_pip=False, symlinks=True)
    found = find("--with-torch", tmp_path / "there" / "bin" / "python")
    assert found.returncode == 1
    assert "no torch\n" in found.stderr
    assert find(tmp_path / "there" / "bin" / "python").returncode == 0


@pytest.mark.integration
def test_a_new_environment_has_the_torch_of_another(tmp_path: Path) -> None:
    there = environment_with_torch(tmp_path / "there", "2.12.1")
    venv.create(tmp_path / "new", with_pip=False, symlinks=True)
    subprocess.run([SHARE_TORCH, there, tmp_path / "new"], check=True, timeout=60)
    code = "import torch; from importlib.metadata import version; print(torch.__file__, version('torch'))"
    shown = subprocess.run(
        [tmp_path / "new" / "bin" / "python", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    place, version = shown.stdout.split()
    assert Path(place).is_relative_to(tmp_path / "there")
    assert version == "2.12.1"


EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
NAMED = re.compile(r"""\b(?:pipx?3?|uv)\s+(?:install|add)\s+(?:-\S+\s+)*['"]?paceline\b""")


@pytest.mark.parametrize("extra", [extra for extra in EXTRAS if extra not in ("all", "dev")])
def test_the_command_for_an_extra_names_its_libraries(extra: str) -> None:
    pip, install, *libraries = shlex.split(install_command(extra))
    assert (pip, install) == ("pip", "install")
    # The ranges are those of the installed metadata, which an edited pyproject.toml does not change.
    required = map(Requirement, requires("paceline") or [])
    wanted = [need for need in required if need.marker and need.marker.evaluate({"extra": extra})]
    assert sorted(libraries) == sorted(str(need).partition(";")[0] for need in wanted)
    assert {need.name for need in wanted} == {Requirement(text).name for text in EXTRAS[extra]}


def test_the_command_for_what_the_metadata_does_not_have() -> None:
    assert install_command("nothing") == "pip install '.[nothing]' in a checkout of Paceline"


def test_nothing_says_to_install_the_name_that_no_index_has_registered() -> None:
    """Whoever took the name there would get our users."""
    assert NAMED.search("pip install --upgrade 'paceline[serve]'")
    assert not NAMED.search("pip install --no-index --find-links wheels paceline")
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", ROOT / "Dockerfile"]
    for folder in ("docs", "src", "plugins", "examples", "benchmarks", "scripts"):
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".md", ".py", ".html", ".js", ".toml")]
    assert [str(path) for path in files if NAMED.search(path.read_text(encoding="utf-8"))] == []
    sources = "".join(path.read_text(encoding="utf-8") for path in files if path.suffix == ".py")
    assert set(re.findall(r"""install_command\(['"]([\w-]+)""", sources)) <= set(EXTRAS)


def test_a_run_says_once_how_tensorboard_is_installed(run_processes: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TENSORBOARD, "train", TASK, "--max-steps", "1"]
    done = run_processes.run([*command, "--nproc", "1", "--threads", "1", "--run-dir", tmp_path / "run"])
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("pip install 'tensorboard<") == 1
    assert not (tmp_path / "run" / "tensorboard").exists()
