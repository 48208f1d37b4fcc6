"""Communication hooks of DistributedDataParallel, and PowerSGD (``--comm-hook``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.strategy import StrategyOptions
from paceline.parallel.torch_ddp import TorchDDP
from paceline.parallel.world import ParallelDims, World
from paceline.training.group_context import GroupContext
from paceline.training.hooks import StepHook
from paceline.training.trainer import SyncEngine
from paceline_more_strategies.options import CommunicationOptions

# --- Compressed gradients for ``DistributedDataParallel``, by torch's own hooks ---
#
# ``fp16`` and ``bf16`` halve the traffic; PowerSGD also has a state.


# --- PowerSGD's state by parameter, so that a checkpoint can contain it ---
#
# torch's hook keeps its state by bucket, and ``DistributedDataParallel`` rebuilds its buckets after its first step.
# Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019.


POWERSGD_WARMUP = 10
"""Number of first steps without compression, because early gradients change too much."""


class PowerSGD:
    """torch's PowerSGD hook with a state that can be saved and loaded.

    The *error*, the part of a gradient that was not sent, differs between ranks and is added to the next gradient. The
    *factor* (columns x rank) of each matrix, the start of the next step's power iteration, is equal on all ranks.

    Args:
        scale: factor of the gradients, sums over a rank's samples, before the hook.
    """

    def __init__(self, module: nn.Module, world: World, rank: int, scale: float) -> None:
        self._world = world
        self._scale = scale
        self._rank = rank
        self._named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._layout: dict[int, list[torch.Tensor]] = {}  # each bucket's parameters
        self._errors: dict[int, torch.Tensor] = {}  # by the id of a parameter that is in no bucket
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
        """Compress and reduce a bucket; called by ``DistributedDataParallel``."""
        if self._last is not None:
            self._last.wait()
        parameters = bucket.parameters()
        known = self._layout.get(bucket.index(), [])
        if len(known) != len(parameters) or any(a is not b for a, b in zip(known, parameters, strict=True)):
            if known:
                self._leave_buckets(bucket.index())
            self._enter_bucket(bucket.index(), parameters)
        answer = powerSGD_hook.powerSGD_hook(self._state, bucket)
        # torch's hook waits for its later sums in one of gloo's two threads, so two buckets at once would deadlock, and
        # in another order than that of the collective in which DDP sums up which parameters are used. Therefore one
        # bucket is processed at a time, and that collective follows the last one.
        self._last = answer if self._world.backend == "gloo" else None
        if bucket.is_last() and self._last is not None:
            self._last.wait()
        return answer

    def gather_state(self) -> dict[str, Any]:
        """Gather all ranks' state on rank 0; a collective."""
        errors, factors = self._by_parameter()
        is_first = self._world.rank == 0
        of_all: dict[str, torch.Tensor] = {}
        with translate_peer_errors():
            for name, parameter in self._named.items():
                if id(parameter) in errors:
                    error = (errors[id(parameter)] / self._scale).contiguous()
                    parts = [torch.empty_like(error) for _ in range(self._world.world_size if is_first else 0)]
                    dist.gather(error, parts or None, group=self._world.group, group_dst=0)
                    of_all[name] = torch.stack(parts) if is_first else error
        return {
            "steps": self._state.iter,
            "errors": of_all,
            "factors": {n: factors[id(p)].clone() for n, p in self._named.items() if id(p) in factors},
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Load the result of :meth:`gather_state` before the first step.

        With the same world size each rank takes its own errors; otherwise each takes an equal part of their sum.
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

    def _enter_bucket(self, index: int, parameters: Sequence[torch.Tensor]) -> None:
        """Lay the state out as torch's hook expects it for a bucket."""
        self._layout[index] = list(parameters)
        if all(id(p) in self._errors for p in parameters):
            errors = [self._errors.pop(id(p)).reshape(-1) for p in parameters]
            self._state.error_dict[index] = torch.cat(errors)
        factored = self._factored(parameters)
        factors = [self._factors.pop(id(p), None) for p in factored]
        shapes = [(_columns(p), self._rank_of(p)) for p in factored]
        # Factors of another --powersgd-rank are unusable; the hook draws new ones.
        usable = [f for f, shape in zip(factors, shapes, strict=True) if f is not None and f.shape == shape]
        if usable and len(usable) == len(factored):
            self._state.q_memory_dict[index] = torch.cat([factor.reshape(-1) for factor in usable])
            rows = sum(p.shape[0] * self._rank_of(p) for p in factored)
            self._state.p_memory_dict[index] = usable[0].new_empty(rows)

    def _leave_buckets(self, first: int) -> None:
        """Keep the state of this and later buckets by parameter, before they change.

        The hook runs for buckets in their order; earlier ones belong to the current backward and are in use.
        """
        self._errors, self._factors = self._by_parameter(first)
        for index in [index for index in self._layout if index >= first]:
            for memory in (self._state.error_dict, self._state.p_memory_dict, self._state.q_memory_dict):
                memory.pop(index, None)
            del self._layout[index]

    def _by_parameter(self, first: int = 0) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Return errors and factors of the buckets from ``first`` on, and of parameters in no bucket."""
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
        """Return the parameters that the hook sends as two thin matrices, in its order: equal shapes together."""
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


# --- The strategy, and its engine, which saves what PowerSGD has not sent ---


class CompressedDDP(TorchDDP):
    """``DistributedDataParallel`` with a communication hook."""

    engine = "paceline_more_strategies.compression:CompressionEngine"

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        super().__init__(module, mesh, options)
        world, communication = mesh.world, options.config[CommunicationOptions]
        # Scale by a power of two to about means over a rank's samples, because sums may overflow fp16.
        self._scale = 0.5 ** (options.config.global_batch_size // world.world_size).bit_length()
        self.powersgd: PowerSGD | None = None
        if communication.comm_hook == "powersgd":
            self.powersgd = PowerSGD(module, world, communication.powersgd_rank, self._scale)
            # A lambda, because DistributedDataParallel rejects annotations that are strings.
            self._ddp.register_comm_hook(self.powersgd, lambda memory, bucket: memory.hook(bucket))
        elif communication.comm_hook == "fp16":
            self._ddp.register_comm_hook(world.group, default_hooks.fp16_compress_hook)
        else:
            # A lambda, because DistributedDataParallel rejects torch's own hook by name without NCCL, though gloo can.
            self._ddp.register_comm_hook(
                world.group, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket)
            )


class CompressionEngine(SyncEngine):
    """Synchronous training, in which PowerSGD's state belongs to the state of the run."""

    _powersgd: PowerSGD | None = None

    def step_hooks(self, group: GroupContext) -> list[StepHook]:
        assert isinstance(group.strategy, CompressedDDP)
        self._powersgd = group.strategy.powersgd
        saved = self._states.state.engine_parts.pop("powersgd", None)
        if saved is not None and self._powersgd is not None:
            self._powersgd.load(saved)
        return []

    def gather_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return state if self._powersgd is None else {**state, "powersgd": self._powersgd.gather_state()}
