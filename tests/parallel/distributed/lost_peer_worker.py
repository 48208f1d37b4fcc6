"""One of three ranks; rank 2 is late, and then killed: ``python lost_peer_worker.py shared|group``."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.environment import detect_environment
from paceline.core.errors import PeerLostError
from paceline.parallel import reducer
from paceline.parallel.reducer import GradientReducer
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.parallel.world import World, open_world


def build(model: nn.Module, world: World, timeout_s: float) -> GradientReducer:
    return GradientReducer(model, ReductionPlan(3, world.world_size), world, row_length=0, timeout_s=timeout_s)


def step(reduction: GradientReducer, model: nn.Module, world: World) -> None:
    reduction.begin([world.rank])
    reduction.begin_microbatch()
    loss = model(torch.ones(1, 64)).sum()
    loss.backward()
    reduction.end_microbatch(1, 1.0, loss, 0)
    reduction.finish([])


def error_of(reduction: GradientReducer, model: nn.Module, world: World) -> dict[str, Any]:
    try:
        step(reduction, model, world)
    except PeerLostError as error:
        return {"text": str(error), "rank": error.rank}
    return {"text": "no error", "rank": None}


def mapped_in_shm() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({" ".join(line.split(maxsplit=5)[4:]) for line in lines if "memfd:paceline" in line})


def main(mode: str) -> None:
    torch.set_num_threads(1)
    report: dict[str, Any] = {}
    if mode == "group":
        reducer.supported = lambda _: False
    with open_world(detect_environment(), device="cpu") as world:
        model = nn.Linear(64, 64)
        patient, impatient = build(model, world, 1800.0), build(model, world, 3.0)
        step(patient, model, world)
        if mode == "shared":
            if world.rank != 2:
                report["late"] = error_of(impatient, model, world)
            world.barrier()
        print("ready", flush=True)
        if world.rank == 2:
            signal.pause()
        report["killed"] = error_of(patient, model, world)
        report["shared_memory"] = mapped_in_shm()
        for reduction in (patient, impatient, patient):
            reduction.close()
    print(json.dumps(report), flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1])
