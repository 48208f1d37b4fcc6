"""One rank of the preflight all-reduce: ``python -m paceline.launch.preflight.canary '{"rank": 0, ...}'``.

The ranks communicate as a job's do, over the same interface and backend. Each prints a line of JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

_LARGE, _SMALL = 1 << 22, 1 << 16  # bytes
_SLOW_S = 0.05  # for the small one
_ROUNDS = 5


def measure(values: dict[str, Any]) -> dict[str, Any]:
    """Time an all-reduce: milliseconds, and bus bandwidth as in nccl-tests."""
    import torch
    import torch.distributed as dist

    from paceline.core.environment import Environment
    from paceline.parallel.world import open_world

    torch.set_num_threads(1)
    interface, timeout_s = values.pop("interface"), values.pop("timeout_s")
    environment = Environment(**values, source="caller", job_id="paceline-doctor")
    with open_world(
        environment, interface=interface, init_timeout_s=timeout_s, collective_timeout_s=timeout_s
    ) as world:
        expected = sum(range(1, world.world_size + 1))
        is_correct = True

        def timed(size: int) -> float:
            nonlocal is_correct
            values = torch.full((size // 4,), float(world.rank + 1), device=world.device)
            world.barrier()  # torch's own waits for the GPU
            start = time.perf_counter()
            dist.all_reduce(values)
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            is_correct &= bool((values == expected).all())
            return seconds

        timed(_SMALL)  # opens the connections
        slowest = torch.tensor([timed(_SMALL)])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        size = _LARGE if slowest.item() < _SLOW_S else _SMALL
        median_s = statistics.median(timed(size) for _ in range(_ROUNDS))
        return {
            "right": is_correct,
            "bytes": size,
            "ms": median_s * 1e3,
            "bytes_per_s": size / median_s * 2 * (world.world_size - 1) / world.world_size,
            "backend": world.backend,
            "ranks": world.world_size,
        }


def main(text: str) -> int:
    """Run the rank; print the result or the error as JSON."""
    try:
        result = measure(json.loads(text))
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}".strip().partition("\n")[0]}
    print(json.dumps(result), flush=True)
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
