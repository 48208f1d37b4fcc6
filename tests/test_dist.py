"""What `make dist` builds: both files can be installed where no Paceline is, and the release's files agree."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import yaml

import paceline

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_wheel_and_sdist_train_in_an_environment_without_paceline(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    # The libraries of this one; of Paceline it has a path file only, which is read in no other environment.
    [site] = environment.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python, script = environment / "bin" / "python", ROOT / "scripts" / "build_dist.py"
    done = subprocess.run(
        [sys.executable, script, "--python", python, "--into", tmp_path / "dist"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in (tmp_path / "dist").iterdir()) == [
        f"paceline-{paceline.__version__}-py3-none-any.whl",
        f"paceline-{paceline.__version__}.tar.gz",
    ]
    assert "exactly once" in done.stdout


def test_the_files_of_a_release_name_its_version() -> None:
    [version, *_] = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version == paceline.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_the_changelog_can_be_read() -> None:
    """A user reads one page; the history is git's."""
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 120
