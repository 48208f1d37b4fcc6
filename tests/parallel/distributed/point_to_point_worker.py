"""One rank of the tests of messages: ``python point_to_point_worker.py REPORT``, with RANK and the like set.

``DEVICE`` and ``BACKEND`` are those of its tensors.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from paceline.core.environment import detect_environment
from paceline.parallel import point_to_point
from paceline.parallel.point_to_point import (
    Message,
    describe_tensor,
    empty_tensor,
    receive_tensor,
    send_tensor,
    start_messages,
)
from paceline.parallel.world import World, open_world

point_to_point._PIECE_BYTES = 1000


def all_to_all(world: World) -> list[list[float]]:
    """Each rank sends each other rank two tensors of different lengths and an empty one; what it got, by source."""
    others = [rank for rank in range(world.world_size) if rank != world.rank]

    def made(source: int, to: int, number: int) -> torch.Tensor:
        return torch.full((0 if number == 1 else 3 + number + source,), source + to / 8 + number / 64)

    numbers = range(3)
    received = {(peer, n): made(peer, -1, n).to(world.device) for n in numbers for peer in others}
    sends = [Message(made(world.rank, peer, n).to(world.device), peer, n) for peer in others for n in numbers]
    receives = [Message(received[peer, n], peer, n) for n in numbers for peer in others]
    start_messages(world, sends, receives).wait()
    return [[*received[peer, n].tolist()] for peer in others for n in numbers]


def tensors(world: World) -> list[torch.Tensor]:
    """Tensors of many kinds; the one of an optimizer's step lies on the CPU of every rank."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.tensor(3.0),
        torch.randn(2, 3, 5, 7, generator=generator).to(world.device, memory_format=torch.channels_last),
        torch.randn(4, 4, generator=generator).to(world.device).t(),
        torch.tensor([True, False, True], device=world.device),
        torch.randn(3, dtype=torch.complex64, generator=generator).to(world.device),
        torch.empty(0, 3, device=world.device),
        torch.arange(1000, device=world.device),
        torch.randn(9, generator=generator).to(world.device, torch.bfloat16),
    ]


def whole_tensors(world: World) -> list[Any]:
    """Rank 0 sends tensors of many kinds to ranks 1 and 2; what did not arrive as it was sent."""
    sent = tensors(world)
    wrong: list[Any] = []
    for number, tensor in enumerate(sent):
        description = json.loads(json.dumps(describe_tensor(tensor)))
        if world.rank == 0:
            send_tensor(world, tensor, [1, 2])
        elif world.rank <= 2:
            received = empty_tensor(description, world.device)
            receive_tensor(world, received, 0)
            same = received.dtype == tensor.dtype and received.device == tensor.device
            if not (same and torch.equal(received, tensor)):
                wrong.append([number, str(received)])
    return wrong


def main() -> None:
    device: Any = os.environ["DEVICE"]
    backend: Any = os.environ["BACKEND"]
    with open_world(detect_environment(), device=device, backend=backend) as world:
        report = {"all_to_all": all_to_all(world), "wrong": whole_tensors(world)}
        world.barrier()
    Path(sys.argv[1]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
