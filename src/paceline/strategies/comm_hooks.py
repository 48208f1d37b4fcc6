"""Compressed gradients for ``DistributedDataParallel`` (``--comm-hook``), by torch's own hooks.

``fp16`` and ``bf16`` halve what is sent. ``powersgd`` sends each matrix as two thin ones, and adds what they
leave out to the next step's gradient: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", 2019.
"""

from __future__ import annotations

from typing import Any

from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

POWERSGD_WARMUP = 10
"""Steps after each start in which gradients are not factored: early ones change too much."""


def register(
    ddp: DistributedDataParallel, group: dist.ProcessGroup | None, name: str, powersgd_rank: int
) -> None:
    """Have ``ddp`` send its gradients by the hook of this name."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            group,
            matrix_approximation_rank=powersgd_rank,
            start_powerSGD_iter=POWERSGD_WARMUP,
            min_compression_rate=1,
            orthogonalization_epsilon=1e-8,
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name == "fp16":
        ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
    else:

        def bf16(group: dist.ProcessGroup, bucket: Any) -> Any:
            return default_hooks.bf16_compress_hook(group, bucket)

        # DistributedDataParallel refuses torch's own by its name where there is no NCCL; gloo can do it too.
        # Annotations, which it checks, are texts here.
        bf16.__annotations__.clear()
        ddp.register_comm_hook(group, bf16)
