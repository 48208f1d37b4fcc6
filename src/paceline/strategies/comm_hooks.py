"""Compressed gradients for ``DistributedDataParallel`` (``--comm-hook``), by torch's own hooks.

``fp16`` and ``bf16`` halve what is sent; :mod:`~paceline.strategies.powersgd` has a memory besides.
"""

from __future__ import annotations

from typing import Any

from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel


def register(ddp: DistributedDataParallel, group: dist.ProcessGroup | None, name: str) -> None:
    """Have ``ddp`` send its gradients in half precision, by the hook of this name."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if name == "fp16":
        ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
    else:

        def bf16(group: dist.ProcessGroup, bucket: Any) -> Any:
            return default_hooks.bf16_compress_hook(group, bucket)

        # DistributedDataParallel refuses torch's own by its name where there is no NCCL; gloo can do it too.
        # Annotations, which it checks, are texts here.
        bf16.__annotations__.clear()
        ddp.register_comm_hook(group, bf16)
