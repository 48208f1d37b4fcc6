"""The examples of what people do: each trains, and learns."""

from __future__ import annotations

import ast
import csv
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests.processes import Processes

import paceline

EXAMPLES = Path(__file__).parents[2] / "examples"


def images(root: Path) -> list[str]:
    """Dark and light images, of several sizes."""
    draw = random.Random(0)
    for split, number in (("train", 24), ("test", 8)):
        for label, shade in (("dark", 40), ("light", 200)):
            (root / split / label).mkdir(parents=True)
            for i in range(number):
                colour = tuple(shade + draw.randint(-30, 30) for _ in range(3))
                Image.new("RGB", (20 + i, 30), colour).save(root / split / label / f"{i}.png")
    return ["image_folder.py:Images", f"root={root}", "size=16", "width=4", "lr=0.01"]


def table(root: Path) -> list[str]:
    draw = random.Random(0)
    with (root / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["length", "weight", "island", "species"])
        for _ in range(200):
            island, weight = draw.choice(["Dream", "Biscoe", ""]), draw.gauss(4, 1)
            species = "Gentoo" if weight + (island == "Biscoe") > 4.5 else "Adelie"
            writer.writerow([draw.choice(["", draw.randint(30, 60)]), f"{weight:.2f}", island, species])
    return ["table.py:Table", f"path={root / 'table.csv'}", "target=species"]


def texts(root: Path) -> list[str]:
    draw = random.Random(0)
    for split, number in (("train", 240), ("test", 48)):
        with (root / f"{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            for _ in range(number):
                label = draw.randrange(2)
                words = draw.choices([*"abcdefgh", ("good", "bad")[label]], k=draw.randint(3, 12))
                writer.writerow([" ".join([*words, ("fine", "poor")[label]]), label])
    return ["text_classifier.py:TextClassifier", f"data={root}", "length=16", "width=16", "lr=0.01"]


def result(run: Path) -> Any:
    return json.loads((run / "result.json").read_text())


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (images, ("--nproc", "2", "--num-workers", "1", "--global-batch-size", "16", "--epochs", "4")),
        (table, ("--epochs", "10")),
        (texts, ()),
    ],
)
def test_a_task_learns(run_processes: Processes, tmp_path: Path, data: Any, options: tuple[str, ...]) -> None:
    folder, run = tmp_path / "data", tmp_path / "run"
    folder.mkdir()
    task, *fields = data(folder)
    sets = [word for field in fields for word in ("--set", field)]
    env = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    commands = [("train", EXAMPLES / task, *sets, *options, "--threads", "1", "--run-dir", run)]
    if data is table:
        commands += [
            ("export", run, "--name", "penguins"),
            ("predict", "penguins", folder / "table.csv", "--output", tmp_path / "predicted.csv"),
        ]
    if data is images:  # the line in its docstring for a cluster
        slurm = ("--on", "slurm", "--gpus-per-node", "8", "--nproc", "8", "--cpus-per-task", "9", "--walltime", "4h")
        commands += [("train", EXAMPLES / task, *sets, "--precision", "bf16", *slurm, "--dry-run")]
    for command in commands:
        done = run_processes.paceline(*map(str, command), env=env)
        assert done.returncode == 0, done.stderr
    assert result(run)["metrics"]["test"]["accuracy"] > 0.9
    if data is images:
        assert "#SBATCH --gres=gpu:8\n" in done.stdout
    if data is table:
        with (tmp_path / "predicted.csv").open() as file:
            assert sum(row["label"] == row["species"] for row in csv.DictReader(file)) > 180


@pytest.mark.parametrize(("name", "ranks"), [("own_loop", "2"), ("gan", "1")])
def test_a_loop_of_its_own(run_processes: Processes, tmp_path: Path, name: str, ranks: str) -> None:
    launch = ("launch", "--on", "spawn", "--nproc", ranks, "--threads", "1", "--", str(EXAMPLES / f"{name}.py"))
    done = run_processes.paceline(*launch, "--epochs", "2", "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "run")["epochs"] == 2
    if name == "own_loop":
        *_, accuracy = re.findall(r"'accuracy': ([0-9.]+)", done.stdout)
        assert float(accuracy) > 0.8
    else:  # a picture of each epoch
        assert sum(set(line) <= set(" .+x#") and len(line) == 48 for line in done.stdout.splitlines()) == 16


@pytest.mark.parametrize("name", ["image_folder", "table", "text_classifier", "own_loop", "gan"])
def test_an_example_imports_public_names_only(name: str) -> None:
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert {module for module in imported if module.startswith("paceline")} == {"paceline"}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "paceline"
    }
    assert all(getattr(paceline, attribute) for attribute in used)
