"""PyTorch's DistributedDataParallel, its communication hooks, and PowerSGD."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from paceline.core.errors import ConfigError
from paceline.parallel.microbatches import ExternalReduceStrategy, compile_model
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.parallel.strategy import StrategyOptions
from paceline.parallel.world import ParallelDims, World, translate_peer_errors

# --- Compressed gradients for ``DistributedDataParallel`` (``--comm-hook``), by torch's own hooks ---
#
# ``fp16`` and ``bf16`` halve what is sent; :mod:`~paceline.parallel.torch_ddp` has a memory besides.


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


# --- PowerSGD's memory, kept by parameter, so that a checkpoint can hold it ---
#
# torch's hook knows what it left out by bucket, and ``DistributedDataParallel`` makes its buckets anew after
# its first step. Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
# Optimization", 2019.


POWERSGD_WARMUP = 10
"""A run's first steps, whose gradients are not factored: early ones change too much."""


class PowerSGD:
    """torch's hook, whose memory can be taken out and put in.

    What is left out of a gradient (the *error*) differs from rank to rank, and is added to the next one. The
    *factor* (columns x rank) of each matrix, with which the next step's power iteration begins, is the same
    on all ranks.

    Args:
        module: what is trained.
        world: the ranks.
        rank: columns of the thin matrices.
        scale: what gradients, sums over a rank's samples, are multiplied by before the hook sees them.
    """

    def __init__(self, module: nn.Module, world: World, rank: int, scale: float) -> None:
        self._world = world
        self._scale = scale
        self._rank = rank
        self._named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._layout: dict[int, list[torch.Tensor]] = {}  # each bucket's parameters
        self._errors: dict[int, torch.Tensor] = {}  # by the id of the parameter, while in no bucket
        self._factors: dict[int, torch.Tensor] = {}
        self._last: torch.futures.Future[torch.Tensor] | None = None
        self._state = powerSGD_hook.PowerSGDState(
            world.group,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=POWERSGD_WARMUP,
            min_compression_rate=1,
            orthogonalization_epsilon=1e-8,
        )

    def hook(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """What ``DistributedDataParallel`` calls for each bucket."""
        if self._last is not None:
            self._last.wait()
        parameters = bucket.parameters()
        known = self._layout.get(bucket.index(), [])
        if len(known) != len(parameters) or any(a is not b for a, b in zip(known, parameters, strict=True)):
            if known:
                self._take_out(bucket.index())
            self._put_in(bucket.index(), parameters)
        answer = powerSGD_hook.powerSGD_hook(self._state, bucket)
        # torch's hook waits for its later sums in a thread of gloo's, of which there are two: with a bucket
        # in each of them, all wait for ever. So there is one at a time.
        self._last = answer if self._world.backend == "gloo" and not bucket.is_last() else None
        return answer

    def gather_state(self) -> dict[str, Any]:
        """All ranks' memory, on the first rank; all of them call this together.

        Raises:
            PeerLostError: a rank is gone.
        """
        errors, factors = self._by_parameter()
        of_all: dict[str, torch.Tensor] = {}
        with translate_peer_errors():
            for name, parameter in self._named.items():
                if id(parameter) in errors:
                    of_all[name] = self._of_all_ranks(errors[id(parameter)] / self._scale)
        return {
            "steps": self._state.iter,
            "errors": of_all,
            "factors": {n: factors[id(p)].clone() for n, p in self._named.items() if id(p) in factors},
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what :meth:`gathered` gave, before the first step.

        With as many ranks each takes its own errors; with others each takes an equal part of their sum,
        which is what the ranks together still owe.
        """
        self._state.iter = int(saved["steps"])
        ranks = self._world.world_size
        for name, parameter in self._named.items():
            if name in saved["errors"]:
                of_ranks = saved["errors"][name].to(parameter)
                own = of_ranks[self._world.rank] if len(of_ranks) == ranks else of_ranks.sum(0) / ranks
                self._errors[id(parameter)] = own * self._scale
            if name in saved["factors"]:
                self._factors[id(parameter)] = saved["factors"][name].to(parameter, copy=True)

    def _of_all_ranks(self, error: torch.Tensor) -> torch.Tensor:
        """Errors of the ranks, stacked, on the first of them."""
        there = error.new_empty((self._world.world_size, *error.shape)) if self._world.rank == 0 else None
        parts = None if there is None else list(there.unbind())
        dist.gather(error.contiguous(), parts, group=self._world.group, group_dst=0)
        return error if there is None else there

    def _put_in(self, index: int, parameters: Sequence[torch.Tensor]) -> None:
        """Lay the memory out as torch's hook finds it for a bucket."""
        self._layout[index] = list(parameters)
        if all(id(p) in self._errors for p in parameters):
            errors = [self._errors.pop(id(p)).reshape(-1) for p in parameters]
            self._state.error_dict[index] = torch.cat(errors)
        factored = self._factored(parameters)
        factors = [self._factors.pop(id(p), None) for p in factored]
        shapes = [(_columns(p), self._rank_of(p)) for p in factored]
        # Of another --powersgd-rank they are of no use: the hook draws new ones.
        there = [f for f, shape in zip(factors, shapes, strict=True) if f is not None and f.shape == shape]
        if there and len(there) == len(factored):
            self._state.q_memory_dict[index] = torch.cat([factor.reshape(-1) for factor in there])
            rows = sum(p.shape[0] * self._rank_of(p) for p in factored)
            self._state.p_memory_dict[index] = there[0].new_empty(rows)

    def _take_out(self, first: int) -> None:
        """Before this and later buckets are others: keep their memory by parameter.

        The hook is called for buckets in their order; those before it are in this backward's, and at work.
        """
        self._errors, self._factors = self._by_parameter(first)
        for index in [index for index in self._layout if index >= first]:
            for memory in (self._state.error_dict, self._state.p_memory_dict, self._state.q_memory_dict):
                memory.pop(index, None)
            del self._layout[index]

    def _by_parameter(self, first: int = 0) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Errors and factors of the buckets from this one on, and of what is in no bucket."""
        errors, factors = dict(self._errors), dict(self._factors)
        for index, parameters in self._layout.items():
            if index < first:
                continue
            if index in self._state.error_dict:
                parts = torch.split(self._state.error_dict[index], [p.numel() for p in parameters])
                errors |= {id(p): e.view(p.shape) for p, e in zip(parameters, parts, strict=True)}
            if index in self._state.q_memory_dict:
                factored = self._factored(parameters)
                sizes = [_columns(p) * self._rank_of(p) for p in factored]
                parts = torch.split(self._state.q_memory_dict[index], sizes)
                pairs = zip(factored, parts, strict=True)
                factors |= {id(p): q.view(_columns(p), self._rank_of(p)) for p, q in pairs}
        return errors, factors

    def _rank_of(self, parameter: torch.Tensor) -> int:
        return min(parameter.shape[0], _columns(parameter), self._rank)

    def _factored(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those that the hook sends as two thin matrices, in its order: the same shapes together."""
        shapes: dict[tuple[int, int], list[torch.Tensor]] = {}
        for parameter in parameters:
            if not parameter.dim():
                continue
            rows, columns = parameter.shape[0], _columns(parameter)
            if (rows + columns) * self._rank_of(parameter) < rows * columns:
                shapes.setdefault((rows, columns), []).append(parameter)
        return [parameter for alike in shapes.values() for parameter in alike]


def _columns(parameter: torch.Tensor) -> int:
    return parameter.numel() // max(1, parameter.shape[0])


# --- Data parallelism by torch's own ``DistributedDataParallel`` (``--reduction ddp``, ``--comm-hook``) ---


class TorchDDP(ExternalReduceStrategy):
    """``DistributedDataParallel`` sums the gradients while the backward of a rank's last micro-batch runs.

    Attributes:
        powersgd: the hook with a memory, if that is the one.

    Raises:
        ConfigError: there is only one process.
    """

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        world, hook = mesh.world, options.config.comm_hook
        if world.world_size == 1:
            option = "--reduction ddp" if hook == "none" else f"--comm-hook {hook}"
            raise ConfigError(f"{option} needs at least two processes; with one, leave it out.")
        plan = ReductionPlan(sum(options.work_split), world.world_size, "allreduce", options.work_split)
        super().__init__(module, mesh, plan, options)
        self._ddp = DistributedDataParallel(
            module,
            device_ids=[world.device] if world.device.type == "cuda" else None,
            forward_sync_buffers=False,  # the reducer takes their mean
            gradient_as_bucket_view=True,
            # Its static graph fails an assertion of torch's where a backward is not followed by a sum.
            static_graph=options.static_graph and max(options.work_split) == 1,
        )
        self._scale = 1.0
        self.powersgd: PowerSGD | None = None
        if hook != "none":
            # About means over a rank's samples, by a power of two: sums may be more than fp16 can hold.
            self._scale = 0.5 ** (options.global_batch_size // world.world_size).bit_length()
        if hook == "powersgd":
            self.powersgd = PowerSGD(module, world, options.config.powersgd_rank, self._scale)
            # A lambda: DistributedDataParallel wants no annotations that are texts.
            self._ddp.register_comm_hook(self.powersgd, lambda memory, bucket: memory.hook(bucket))
        elif hook != "none":
            register(self._ddp, world.group, hook)
        self.model = compile_model(self._ddp) if options.compile else self._ddp
        self._world = world

    def _begin_microbatch(self) -> None:
        super()._begin_microbatch()
        # Gradients travel with the rank's last micro-batch, as under DDP.no_sync().
        self._ddp.require_backward_grad_sync = self._micro_steps_left == 0

    def backward(self, loss: torch.Tensor) -> None:
        if self._micro_steps_left == 0:
            self._world.progress_tracker.begin_collective("all-reduce")  # somewhere in it, DistributedDataParallel does
        with translate_peer_errors():
            super().backward(loss * self._scale)
        if self._micro_steps_left == 0:
            self._world.progress_tracker.end_collective()

    def _take_mean(self, gradients: list[torch.Tensor], weight: float) -> None:
        # DDP divides by the number of ranks; what is wanted is the sum over the summed weights.
        torch._foreach_mul_(gradients, self._world.world_size / (weight * self._scale))
