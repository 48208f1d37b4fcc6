"""The core works without any plug-in: it trains, resumes, audits, launches and exports where none is installed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from tests.processes import Processes

from paceline.core.built_in import (
    BUILT_IN,
    COMMANDS,
    DIRECTORY_FORMATS,
    FRAMEWORKS,
    LAUNCHER_OPTIONS,
    NAMES,
    OPTION_GROUPS,
    PARTS,
    RANK_DETECTORS,
    RECORDED_TASKS,
    SLURM_BODIES,
    TASK_PREFIXES,
    VERIFIED,
)

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
TASK = f"{ROOT / 'tests/network_file_systems/tasks.py'}:Dots"
STEPS = ("--max-steps", "16", "--threads", "1", "--quiet")
TWO_NODES = ("--run-dir", "two", "--nodes", "2", "--node-rank", "0", "--rdzv-endpoint", "127.0.0.1:29633")

Paceline = Callable[..., CompletedProcess[str]]


@pytest.fixture
def alone(run_processes: Processes, tmp_path: Path) -> Paceline:
    """Run a command in an environment that has the core and the libraries of this one, and no plug-in."""
    done = run_processes.run([sys.executable, "-m", "venv", "--without-pip", "env"])
    assert done.returncode == 0, done.stderr
    shutil.copytree(
        ROOT / "src" / "paceline", tmp_path / "src" / "paceline", ignore=shutil.ignore_patterns("__pycache__")
    )
    [site] = (tmp_path / "env").glob("lib/python*/site-packages")
    # A folder of a .pth file is searched, and the .pth files in it are not read: those have the plug-ins.
    (site / "core.pth").write_text(f"{tmp_path / 'src'}\n{sysconfig.get_path('purelib')}\n")

    def run(*words: str) -> CompletedProcess[str]:
        return run_processes.run([str(tmp_path / "env" / "bin" / "python"), "-P", "-m", "paceline", *words])

    return run


def test_it_trains_resumes_audits_and_exports(alone: Paceline, tmp_path: Path) -> None:
    sha256 = {}
    for name, options in {
        "inprocess": (),
        "spawn": ("--nproc", "2"),
        "torchrun": ("--nproc", "2", "--on", "torchrun"),
        "fsdp": ("--nproc", "2", "--strategy", "fsdp"),
    }.items():
        done = alone("train", TASK, *STEPS, *options, "--run-dir", name, "--json")
        assert done.returncode == 0, done.stderr
        sha256[name] = json.loads(done.stdout.splitlines()[-1])["model_sha256"]
    assert len(set(sha256.values())) == 1
    for words in (
        ("resume", "spawn", "--quiet"),
        ("audit", "spawn"),
        ("export", "spawn", "--format", "safetensors", "pt2"),
        ("launch", "--on", "spawn", "--nproc", "2", "--", sys.executable, "-c", "print()"),
    ):
        done = alone(*words)
        assert done.returncode == 0, (words, done.stderr)


def test_what_is_in_a_plug_in_names_what_installs_it(alone: Paceline) -> None:
    for package, words in {
        "paceline_serving": ("serve", "fashion-mnist"),
        "paceline_etcd": ("train", TASK, *STEPS, *TWO_NODES, "--coordinator", "etcd://127.0.0.1:2379"),
        "paceline_planning": ("plan", TASK, "--gpus", "2", "--gpu-memory", "8GiB"),
        "paceline_tasks": ("train", "fashion-mnist", *STEPS),
        "paceline_pages": ("runs", "."),
        "paceline_lm": ("train", "hf:model", *STEPS),
        "paceline_trackers": ("train", TASK, *STEPS, "--log-to", "mlflow"),
        "paceline_stores": ("train", TASK, *STEPS, "--backup-to", "copies"),
    }.items():
        done = alone(*words)
        assert done.returncode == 2, words
        assert done.stderr == (
            f"paceline: this needs {package}, a part of Paceline that is not installed here. Install all of it, in a "
            "checkout of Paceline: pip install .\n"
        )


def test_an_option_of_a_plug_in_names_what_installs_it(alone: Paceline, tmp_path: Path) -> None:
    (tmp_path / "options.toml").write_text('lora = "rank=2"\n')
    for words, name in ((("--lora", "rank=2"), "option: --lora."), (("--config", "options.toml"), "'lora'")):
        done = alone("train", TASK, *STEPS, *words)
        assert done.returncode == 2
        assert name in done.stderr
        assert "paceline_fine_tuning" in done.stderr
        assert "which `pip install .` in a checkout installs." in done.stderr


def test_every_place_of_the_tables_exists() -> None:
    references = [command.reference for command in COMMANDS.values()] + [*LAUNCHER_OPTIONS.values()]
    references += [
        *NAMES.values(),
        *PARTS.values(),
        *VERIFIED,
        *OPTION_GROUPS,
        *DIRECTORY_FORMATS.values(),
        *(prefix.reference for prefix in TASK_PREFIXES.values()),
        *(
            reference
            for table in (SLURM_BODIES, FRAMEWORKS, RANK_DETECTORS, RECORDED_TASKS)
            for reference in table.values()
        ),
        *(reference for group in BUILT_IN.values() for reference in group.values()),
    ]
    assert [
        reference for reference in references if importlib.util.find_spec(reference.partition(":")[0]) is None
    ] == []
