"""Files of defaults: a site's, a user's and a project's, and what the command line and a run that exists keep."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.processes import Processes

from paceline.cli.options import read_defaults
from paceline.core.errors import ConfigError

TASK = """
import torch
from torch.utils.data import TensorDataset

import paceline


class Ones(paceline.Task):
    def build_model(self):
        return torch.nn.Linear(2, 1)

    def build_dataset(self, split):
        return TensorDataset(torch.ones(24, 2)) if split == "train" else None

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 0.1)

    def loss(self, model, batch):
        return model(batch[0]).square().mean()
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write the files of a site, a user and a project."""
    monkeypatch.setenv("PACELINE_SITE_CONFIG", str(tmp_path / "site.toml"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    (tmp_path / "home/paceline").mkdir(parents=True)
    (tmp_path / "site.toml").touch()
    (tmp_path / "project").mkdir()
    (tmp_path / "project/task.py").write_text(TASK)
    paths = {"site": "site.toml", "user": "home/paceline/config.toml", "project": "project/paceline.toml"}

    def written(**texts: str) -> None:
        for name, text in texts.items():
            (tmp_path / paths[name]).write_text(text)

    return written


def test_a_file_that_the_site_names_and_has_not_is_an_error(
    monkeypatch: pytest.MonkeyPatch, run_processes: Processes
) -> None:
    monkeypatch.setenv("PACELINE_SITE_CONFIG", "/etc/pacelin.toml")
    done = run_processes.paceline("config")
    assert (done.returncode, done.stderr) == (
        2,
        "paceline: PACELINE_SITE_CONFIG names /etc/pacelin.toml, and there is no such file.\n",
    )


def test_the_nearer_file_the_command_line_and_a_run_that_exists_take_precedence(
    write: Callable[..., None], run_processes: Processes, tmp_path: Path
) -> None:
    write(
        site='[run]\nseed = 1\nepochs = 5\nmicrobatches = 2\nlog_every = 7\n[slurm]\npartition = "gpu"',
        user="[run]\nseed = 2\nmicrobatches = 3\n",
        project="[run]\nmicrobatches = 4\nglobal_batch_size = 12\n",
    )
    command = ("train", "project/task.py:Ones", "--run-dir", "run", "--threads", "1", "--device", "cpu", "--max-steps")

    def options() -> dict[str, object]:
        return tomllib.loads((tmp_path / "run/run.toml").read_text())["config"]

    first = run_processes.paceline(*command, "2", "--log-every", "1")
    assert first.returncode == 0, first.stderr
    config = options()
    assert (config["seed"], config["microbatches"], config["global_batch_size"]) == (2, 4, 12)
    assert (config["max_steps"], config["log_every"]) == (2, 1)
    assert "epochs" not in config  # the command line has --max-steps
    write(user="[run]\nseed = 3\n", project="")
    again = run_processes.paceline(*command, "2")
    assert again.returncode == 0, again.stderr
    assert options() == config


def test_a_dry_run_and_config_say_which_file_an_option_is_from(
    write: Callable[..., None], run_processes: Processes, tmp_path: Path
) -> None:
    write(
        site='[run]\nwalltime = "1h"\n[job]\ncpus_per_task = 3\n[slurm]\npartition = "gpu"\naccount = "physics"\n',
        user='[slurm]\naccount = "mine"\nmodule = ["cuda/12"]\n',
        project="[run]\nseed = 5\n",
    )
    task = ("train", "project/task.py:Ones", "--dry-run")
    dry = run_processes.paceline(*task, "--on", "slurm", "--seed", "6")
    assert dry.returncode == 0, dry.stderr
    site, user = tmp_path / "site.toml", tmp_path / "home/paceline/config.toml"
    assert [line for line in dry.stdout.splitlines() if line.startswith("# --")] == [
        f"# --walltime 1h: {site}",
        f"# --cpus-per-task 3: {site}",
        f"# --partition gpu: {site}",
        f"# --account mine: {user}",
        f"# --module cuda/12: {user}",
    ]
    for line in ("#SBATCH --partition=gpu", "#SBATCH --account=mine", "module load cuda/12"):
        assert line in dry.stdout
    here = run_processes.paceline(*task)
    assert here.returncode == 0, here.stderr  # the options of jobs do not stop a training on this machine
    launched = run_processes.paceline("launch", "--on", "slurm", "--account", "other", "--dry-run", "--", "true")
    assert "#SBATCH --partition=gpu\n#SBATCH --account=other\n" in launched.stdout, launched.stderr
    shown = run_processes.paceline("config", "project/task.py:Ones", "--json")
    rows = {row["option"]: row for row in json.loads(shown.stdout)}
    assert rows["account"] == {"table": "slurm", "option": "account", "value": "mine", "file": str(user)}
    assert rows["seed"]["file"] == "project/paceline.toml"


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("site", "[run]\nsede = 1", "site.toml: [run]: there is no option 'sede'. Did you mean seed"),
        ("site", "[run]\nseed = 'x'", "site.toml: --seed"),
        ("site", "[run]\nnproc = 2", "site.toml: --nproc says which run a command starts, so it must be typed."),
        ("site", "[slrum]\naccount = 'x'", "site.toml: there is no table [slrum]. The tables are: [run], [job], "),
        ("site", "[job]\nnaem = 'x'", "site.toml: [job] has no option 'naem'."),
        ("site", "[slurm]\nacount = 'x'", "site.toml: --acount is not an option of --on slurm, which takes: "),
        ("site", "[slurm]\nmem = 64", "site.toml: mem = 64: expected `str`, got `int`."),
        ("site", "[slurm]\nmodule = 'cuda'", "site.toml: module = 'cuda': expected `array`, got `str`, such as ["),
        ("site", "[slurm]\npartition = ['a']", "site.toml: partition = ('a',): expected `str`, got `array`"),
        ("site", "[job]\nenv = 'A=1'", "site.toml: env = 'A=1': expected `array`, got `str`, such as ["),
        ("site", "[job]\ncpus_per_task = true", "site.toml: cpus_per_task = True: expected `int`, got `bool`."),
        ("site", "[run", "site.toml: "),
        ("project", "[slurm]\nsetup = ['rm x']", "paceline.toml has the table [slurm], which becomes part of commands"),
        ("project", "[run]\npython = './python'", "paceline.toml has python, which becomes part of commands"),
    ],
)
def test_a_mistake_is_said_with_its_file(
    write: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    text: str,
    message: str,
) -> None:
    write(**{file: text})
    monkeypatch.chdir(tmp_path)

    def read() -> None:
        defaults = read_defaults("project/task.py:Ones")
        defaults.launcher_options("slurm", None)
        defaults.job_options(None)

    with pytest.raises(ConfigError, match=re.escape(message)):
        read()
