"""Build the sdist, and from its files the wheel; install each, and train, audit and export with it.

    python scripts/build_dist.py --python ENV/bin/python [--into dist]

The environment has Paceline's requirements, locked, and no Paceline; ``make dist`` makes one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TASK = """
from dataclasses import dataclass

import torch
from torch.utils.data import TensorDataset

import paceline


@dataclass
class Line(paceline.Task):
    def build_model(self):
        return torch.nn.Linear(3, 2)

    def build_dataset(self, split):
        x = torch.randn(64, 3)
        return TensorDataset(x, (x.sum(dim=1) > 0).long())

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
COMMANDS = (
    "version",
    "train line.py:Line --nproc 2 --threads 1 --epochs 1 --run-dir run",
    "audit run",
    "export run --name line",
    "registry ls",
)


def build(into: Path) -> tuple[Path, Path]:
    """Return the paths of the wheel and of the sdist; the wheel is built from the sdist's own files."""
    hatch = [sys.executable, "-m", "hatchling", "build", "--directory", str(into)]
    subprocess.run([*hatch, "--target", "sdist"], cwd=ROOT, check=True)
    [sdist] = into.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as directory:
        with tarfile.open(sdist) as archive:
            archive.extractall(directory, filter="data")
        [unpacked] = Path(directory).iterdir()
        subprocess.run([*hatch, "--target", "wheel"], cwd=unpacked, check=True)
    [wheel] = into.glob("*.whl")
    return wheel, sdist


def try_out(file: Path, python: Path) -> None:
    """Install a file, use it from an empty folder, and remove it."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--python", str(python)]
    subprocess.run([*pip, "install", "--no-deps", "--no-build-isolation", str(file)], check=True)
    subprocess.run([*pip, "check"], check=True)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "line.py").write_text(TASK, encoding="utf-8")
        env = {"HOME": directory, "PATH": "/usr/bin:/bin"}  # and nothing of the caller's
        for command in COMMANDS:
            print(f"{file.name}: paceline {command}", flush=True)
            subprocess.run([python.with_name("paceline"), *command.split()], cwd=directory, env=env, check=True)
        # A plug-in whose library is not installed cannot be imported, but is there.
        missing = f"from importlib.util import find_spec; print(*[n for n in {wheel_packages()} if not find_spec(n)])"
        done = subprocess.run(
            [python, "-c", missing], cwd=directory, env=env, check=True, capture_output=True, text=True
        )
        if done.stdout.strip():
            raise SystemExit(f"{file.name} lacks {done.stdout.strip()}")
    subprocess.run([*pip, "uninstall", "--yes", "paceline"], check=True)


def wheel_packages() -> list[str]:
    """Return the names of the packages that a wheel must have."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        folders = tomllib.load(file)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return [Path(folder).name for folder in folders]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="of an environment without Paceline")
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="where the two files go")
    options = parser.parse_args()
    into = options.into.absolute()
    for old in into.glob("paceline-*"):
        old.unlink()
    for file in build(into):
        try_out(file, options.python.absolute())
    print(f"Both can be installed: {into}")


if __name__ == "__main__":
    main()
