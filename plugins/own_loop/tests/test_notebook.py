"""A task of a notebook's cells trains on several processes, which import what the cells define from a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.processes import Processes

CELLS = [
    """
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline

x = torch.randn(3)  # not that of the task, which has its own
WIDTH = {"hidden": [16]}
""",
    """
class Net(nn.Sequential):
    pass


def build_data(seed):
    torch.manual_seed(seed)
    x = torch.randn(48, 8)
    return TensorDataset(x, (x.sum(1) > 0).long())
""",
    """
@dataclass
class Cell(paceline.Task):
    lr: float = 0.1

    def build_model(self):
        return Net(nn.Linear(8, WIDTH["hidden"][0]), nn.ReLU(), nn.Linear(16, 2))

    def build_dataset(self, split):
        return build_data(1) if split == "train" else None

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def loss(self, model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)
""",
    """
options = {"epochs": 1, "microbatches": 4, "global_batch_size": 24, "threads": 1, "device": "cpu", "quiet": True}
one = paceline.fit(Cell(), nproc=1, run_dir="one", **options)
two = paceline.fit(Cell(lr=0.1), nproc=2, run_dir="two", **options)
print(one.model_sha256 == two.model_sha256, two.world_size, type(two.model()).__name__)
""",
    """
class Other(Cell):
    def build_dataset(self, split):
        return x


try:
    paceline.fit(Other(), nproc=2, run_dir="three", **options)
except paceline.TaskError as error:
    print(error)
""",
]

# As IPython runs them: without a file, and with their sources where Python looks for lines.
SESSION = """
import json, linecache, sys
In = json.loads(sys.argv[1])
for number, cell in enumerate(In):
    name = f"<cell {number}>"
    linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
    exec(compile(cell, name, "exec"))
"""


@pytest.mark.timeout(300)
def test_a_task_of_cells_trains_on_several_processes(run_processes: Processes, tmp_path: Path) -> None:
    done = run_processes.run([sys.executable, "-c", SESSION, json.dumps(CELLS)], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    equal, refused = done.stdout.splitlines()
    assert equal == "True 2 Net"
    assert refused.startswith("the task uses x of the notebook's cells, a Tensor, which other processes do not have.")
    assert "WIDTH = {'hidden': [16]}" in (tmp_path / "two" / "task.py").read_text()
