"""Fully sharded data parallelism with the exact reduction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from paceline.core.built_in import PARTS
from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError, TaskError
from paceline.core.plugins import has_part, import_object
from paceline.data.samples import MicroBatch
from paceline.parallel.options import FsdpOptions
from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.parallel.sharded_state import clip_gradients, gather_full, require_no_hook, require_own_memory
from paceline.parallel.strategy import AMP_DTYPES, ExternalReduceStrategy, MicrobatchWork, StrategyOptions
from paceline.parallel.world import ParallelDims, World
from paceline.parallel.wrap_units import exclude_tied, model_blocks, wrap_units
from paceline.torch_internals import (
    AllGather,
    ConvNd,
    ReduceScatter,
    all_gather_single,
    keep_order_of_input_gradients,
    map_tensors,
    parameter_table,
    reduce_scatter_single,
    tree_leaves,
    watch_gradients,
)

# --- A reduce-scatter that sums along the tree of micro-batches, micro-step by micro-step ---


class _PlainMemory:
    """The ordinary memory of a collective."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate its input or output."""
        return torch.empty(size, dtype=dtype, device=device)


class BroadcastAllGather(_PlainMemory, AllGather):
    """Gathers by a broadcast of each rank's part: gloo's all-gather allocates the whole again, and takes longer."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        parts = output_tensor.chunk(group.size())  # this rank's is the input
        works = [dist.broadcast(part, group=group, group_src=rank, async_op=True) for rank, part in enumerate(parts)]
        for work in works:
            work.wait()
        return None


class TreeReduceScatter(_PlainMemory, ReduceScatter):
    """Sums the ranks' contributions in the micro-steps of a step, in the order of the tree over all micro-batches.

    In each micro-step every rank contributes the gradient of one micro-batch. The owner of a chunk receives the
    contributions to it, and adds them as soon as the tree allows; the last micro-step returns the total and the others
    zeros, so the sum over micro-steps is the total. At most log2(S) partial sums are kept between two micro-steps, and
    none between two steps.

    If several ranks hold the same chunk, each sums a part of it, and they exchange the totals.

    Attributes:
        micro_steps_left: the step's micro-steps after the current one. FSDP does not call this in a micro-step before
            the first one that calls the unit at all: its contributions are zeros.

    Args:
        num_microbatches: S.
        data: all contributing ranks; holders of the same chunk are W / copies apart.
        copies: the holders of this rank's chunk.
    """

    def __init__(self, num_microbatches: int, data: World, copies: World) -> None:
        self._data = data
        self._copies = copies
        self._plan = ReductionPlan(num_microbatches, 1)
        self._grad_buffers: dict[int, torch.Tensor] = {}
        self._micro_steps: list[list[int | None]] = []
        self._waiting: dict[int, torch.Tensor] = {}
        self.micro_steps_left = 0

    def begin(self, micro_steps: Sequence[Sequence[int | None]]) -> None:
        """Begin a step.

        Args:
            micro_steps: for each the micro-batch of each rank, or None for a contribution of weight 0.
        """
        present = sorted(
            microbatch for micro_step in micro_steps for microbatch in micro_step if microbatch is not None
        )
        self._micro_steps = [list(micro_step) for micro_step in reversed(micro_steps)]
        self._leaves = list(reversed(present))
        self._steps = list(reversed(self._plan.accumulation(0, present)))
        nodes = self._plan.subtrees[0]
        self._present = tuple(any(n.start <= microbatch < n.stop for microbatch in present) for n in nodes)
        self._waiting.clear()
        self._grad_buffers.clear()

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        sent = self._by_owner(input_tensor, group.size())
        received = torch.empty_like(sent)
        self._data.progress_tracker.begin_collective("reduce-scatter")
        with translate_peer_errors():
            dist.all_to_all_single(received, sent, group=self._data.group)
        self._data.progress_tracker.end_collective()
        del sent
        if input_tensor.is_cpu:  # torch would keep it until the next unit's, for a GPU's streams
            input_tensor.untyped_storage().resize_(0)
        contributions = received.chunk(self._data.world_size)
        while len(self._micro_steps) > self.micro_steps_left + 1:
            missed = self._micro_steps.pop()
            self._waiting |= {k: torch.zeros_like(contributions[0]) for k in missed if k is not None}
        pairs = zip(self._micro_steps.pop(), contributions, strict=True)
        self._waiting |= {k: contribution for k, contribution in pairs if k is not None}
        while self._leaves and self._leaves[-1] in self._waiting:
            self._add(self._waiting.pop(self._leaves.pop()))
        if self._micro_steps:
            output_tensor.zero_()
        else:
            output_tensor.copy_(self._gather_chunk(self._total())[: output_tensor.numel()])
        return None

    def _by_owner(self, contribution: torch.Tensor, chunks: int) -> torch.Tensor:
        """Order a contribution by the rank that sums it: chunk by chunk, or the first part of all chunks first."""
        copies = self._copies.world_size
        if copies == 1:
            return contribution
        of_chunk = contribution.view(chunks, -1)
        part = -(-of_chunk.shape[1] // copies)
        padded = contribution.new_zeros(chunks, copies * part)
        padded[:, : of_chunk.shape[1]] = of_chunk
        return padded.view(chunks, copies, part).transpose(0, 1).reshape(-1)

    def _gather_chunk(self, total: torch.Tensor) -> torch.Tensor:
        if self._copies.world_size == 1:
            return total
        chunk = total.new_empty(self._copies.world_size * total.numel())
        with translate_peer_errors():
            all_gather_single(chunk, total, group=self._copies.group)
        return chunk

    def _add(self, contribution: torch.Tensor) -> None:
        step = self._steps.pop()
        if not step.fresh:
            self._grad_buffers[step.buffer].add_(contribution)
        elif self._micro_steps:
            # A copy, so that the kept sum does not hold the whole received buffer until the next micro-step.
            self._grad_buffers[step.buffer] = contribution.clone()
        else:
            self._grad_buffers[step.buffer] = contribution
        for into, other in step.merges:
            self._grad_buffers[into].add_(self._grad_buffers.pop(other))

    def _total(self) -> torch.Tensor:
        combine = self._plan.combination(self._present)
        for into, other in combine.additions:
            self._grad_buffers[into].add_(self._grad_buffers[other])
        total = self._grad_buffers[combine.root]
        self._grad_buffers = {}
        return total


class ReduceScatterOverReplicas(_PlainMemory, ReduceScatter):
    """torch's reduce-scatter, followed by the sum over the ranks with the same chunk.

    Args:
        copies: these ranks.
    """

    def __init__(self, copies: World) -> None:
        self._copies = copies

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        with translate_peer_errors():
            reduce_scatter_single(output_tensor, input_tensor, group=group)
            dist.all_reduce(output_tensor, group=self._copies.group)
        return None


# --- Fully sharded data parallelism by torch's ``fully_shard`` (FSDP2, ZeRO-3) ---
#
# Every rank keeps 1/W of each parameter, gradient and optimizer state. A wrap unit's parameters are gathered for
# its forward and again for its backward, and its gradients are reduce-scattered: Rajbhandari et al., "ZeRO:
# Memory Optimizations Toward Training Trillion Parameter Models", 2020.


CAST_MODULES = (nn.Linear, nn.Bilinear, ConvNd)
"""The modules of which autocast casts all parameters."""
_OF_WHOLE_PARAMETERS = (optim.Adafactor, optim.Muon, optim.Rprop, optim.SparseAdam)
"""torch's optimizers that fail on sharded parameters, or whose update of a shard has other bits."""


Fill = Callable[[nn.Module, torch.device], None]
"""Gives the shards of a placed model their values, on the device."""


def _build(build: Callable[[], nn.Module], world: World, *, offloads: bool) -> tuple[nn.Module, Fill]:
    """Build a model, without the values of large tensors if the plug-in that computes these later is here."""
    reference = PARTS["--strategy fsdp"]
    if not has_part(reference):
        return build(), lambda module, device: None
    built: tuple[nn.Module, Fill] = import_object(reference)(build, world, offloads=offloads)
    return built


class FullyShard:
    """Shards a model's parameters over the ranks of the mesh's ``fsdp`` axis, wrap unit by wrap unit.

    Along its ``dp`` axis every rank holds the same shard (hybrid sharding: Zhao et al., "PyTorch FSDP", 2023).
    """

    is_collective = True
    saves_shards = True

    def __init__(self, mesh: ParallelDims, config: RunConfig) -> None:
        if mesh.world.world_size == 1:
            raise ConfigError(
                "--strategy fsdp shards a model over processes, but there is only one. Use --strategy single."
            )
        self._mesh = mesh
        self._config = config

    def place(self, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
        config = self._config
        module, fill = _build(build, self._mesh.world, offloads=config[FsdpOptions].fsdp_offload)
        _require_shardable(module)
        map_tensors(module, lambda tensor: tensor if tensor.is_meta else tensor.to(device))
        # The task may build the model with randomness that Paceline does not seed.
        self._mesh.world.broadcast_module(module)
        assert self._mesh.device_mesh is not None
        reshard = {"auto": None, "always": True, "never": False}[config[FsdpOptions].fsdp_reshard]
        options: dict[str, Any] = {"mesh": self._mesh.device_mesh["fsdp"], "reshard_after_forward": reshard}
        if config[FsdpOptions].fsdp_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        for unit in [*self._units(module), module]:
            # Parameters that autocast keeps in float32 are gathered in float32.
            lowered = config[FsdpOptions].fsdp_mixed_precision and _is_cast(unit)
            types = {str(parameter.dtype) for parameter in _own_parameters(unit) if parameter.requires_grad}
            if len(types) > 1:
                raise ConfigError(
                    f"--strategy fsdp gathers parameters of one type together, but {type(unit).__name__} has "
                    f"{' and '.join(sorted(types))}. Use --strategy zero1."
                )
            fully_shard(unit, mp_policy=self._precision() if lowered else MixedPrecisionPolicy(), **options)
        fill(module, device)
        return module

    def _units(self, module: nn.Module) -> list[nn.Module]:
        """Return the wrap units, inner ones first; other parameters are gathered with the model."""
        chosen = {id(block) for block in wrap_units(module, self._config[FsdpOptions].fsdp_wrap)}
        if self._config[FsdpOptions].fsdp_mixed_precision:
            chosen |= {
                id(child)
                for child in module.modules()
                if not isinstance(child, CAST_MODULES) and _holds_parameters(child)
            }
        below = [child for child in module.modules() if child is not module and id(child) in chosen]
        return exclude_tied(module, reversed(below))

    def _precision(self) -> MixedPrecisionPolicy:
        # Inputs are not cast: autocast does that where it should, and integers must stay.
        return MixedPrecisionPolicy(
            param_dtype=AMP_DTYPES[self._config.training.precision],
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )

    def wrap_optimizers(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, Optimizer]:
        for name, optimizer in optimizers.items():
            if isinstance(optimizer, _OF_WHOLE_PARAMETERS):
                raise ConfigError(
                    f"--strategy fsdp shards the parameters, but the optimizer {name!r}, {type(optimizer).__name__}, "
                    "needs whole ones. Use --strategy zero1, or another optimizer, such as AdamW."
                )
        return optimizers  # their state follows the parameters

    def make_ema_model(self, build: Callable[[], nn.Module], like: nn.Module, device: torch.device) -> nn.Module:
        ema_model = self.place(build, device)
        ema_model.load_state_dict(like.state_dict())
        for unit in ema_model.modules():
            if isinstance(unit, FSDPModule):
                # Without a backward nothing frees gathered parameters, and the average updates only sharded ones.
                unit.set_reshard_after_forward(True, recurse=False)
        return ema_model

    def full(self, state: Any, *, keep: bool) -> Any:
        return gather_full(state, keep=keep)

    def clip_gradients(self, module: nn.Module, max_norm: float) -> torch.Tensor:
        return clip_gradients(module.parameters(), max_norm)


def _require_shardable(module: nn.Module) -> None:
    """Reject a model that ``fully_shard`` cannot shard.

    Raises:
        ConfigError: names the parameter.
    """
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        raise ConfigError(
            f"--strategy fsdp gathers parameters when the model is called, but a {type(module).__name__} has no "
            "forward. Let build_model return a module whose forward calls the parts, or use --strategy zero1."
        )
    for name, parameter in module.named_parameters():
        if not parameter.dim():
            raise ConfigError(
                f"--strategy fsdp cannot shard the parameter {name!r}, which is a single number. "
                "Give it the shape (1,), or use --strategy zero1."
            )
        # Those of channels_last are contiguous, too, where a kernel has one pixel.
        is_image = parameter.dim() > 3 and parameter.stride() != torch.empty(parameter.shape, device="meta").stride()
        if is_image or not parameter.is_contiguous():
            raise ConfigError(
                f"--strategy fsdp shards contiguous parameters, but {name!r} has the strides {parameter.stride()}. "
                "Leave out the memory format channels_last, or use --strategy zero1."
            )
        require_no_hook("fsdp", name, parameter)
    require_own_memory("fsdp", module)
    if any(isinstance(layer, torch.jit.ScriptModule) for layer in module.modules()):
        raise ConfigError(
            "--strategy fsdp gathers parameters by hooks, which a module of torch.jit does not run. Build the model "
            "without torch.jit, or use --strategy zero1."
        )


def _require_compilable(module: nn.Module) -> None:
    """Reject units inside of a block: a compiled forward would not call the hooks that gather them.

    Raises:
        ConfigError: there are some, or no blocks.
    """
    blocks = model_blocks(module)
    inner = (part for block in blocks for part in block.modules() if part is not block)
    if not blocks or any(isinstance(part, FSDPModule) for part in inner):
        reason = "gathers modules inside of them" if blocks else "finds none, a list of composed modules, in this one"
        raise ConfigError(
            f"--compile compiles a model's blocks, but --strategy fsdp {reason}. Leave out "
            f"{'--fsdp-wrap and --fsdp-mixed-precision' if blocks else '--compile'}, or use --strategy zero1."
        )


def _holds_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


class FSDP(ExternalReduceStrategy):
    """Sums a step over ranks that hold a shard of the model each.

    With ``exact``, every micro-batch's gradient is scattered in a micro-step of its own and added along the tree over
    all micro-batches, so the bits do not depend on the number of ranks; with ``allreduce``, a rank adds its
    micro-batches' gradients and scatters once.

    Args:
        module: as :class:`FullyShard` placed it.
    """

    def __init__(self, module: nn.Module, mesh: ParallelDims, options: StrategyOptions) -> None:
        if options.config.training.compile:
            _require_compilable(module)
        num_microbatches = sum(options.work_split)
        plan = ReductionPlan(num_microbatches, mesh.data.world_size, interleaved=True)
        super().__init__(module, mesh, plan, options)
        self._world = mesh.data
        self._num_microbatches = num_microbatches
        self._exact = options.reduction_order == "exact"
        # Gathered parameters are kept from the first forward of a step to its last backward.
        self._keeps = options.config[FsdpOptions].fsdp_reshard == "never"
        copies = mesh.submesh(("dp",))
        self._micro_steps: list[list[int | None]] = []
        self._units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
        self._sums: list[TreeReduceScatter] = []
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            if mesh.world.device.type == "cpu":
                unit.set_custom_all_gather(BroadcastAllGather())
                unit.set_modules_to_backward_prefetch([unit])  # none: nothing computes while a unit is gathered
            # Unused parameters contribute zeros, so that all ranks scatter the same in every micro-step.
            watch_gradients(unit, self._mark_used_in_unit)
            if not any(parameter.requires_grad for parameter in _own_parameters(unit)):
                continue
            if self._exact:
                keep_order_of_input_gradients(unit)
                self._sums.append(TreeReduceScatter(num_microbatches, mesh.data, copies))
                unit.set_custom_reduce_scatter(self._sums[-1])
            elif copies.world_size > 1:
                unit.set_custom_reduce_scatter(ReduceScatterOverReplicas(copies))
        self._in_loss = False
        self._is_called = False
        self._hooks = [unit.register_forward_pre_hook(self._make_guard(unit), prepend=True) for unit in self._units]
        self._hooks += [unit.register_forward_hook(self._guard_outputs) for unit in self._units]

    def begin_step(self, present: Sequence[int]) -> None:
        # An evaluation leaves parameters gathered, and FSDP could not free memory that numpy has seen.
        for unit in self._units:
            unit.reshard()
        self._micro_steps = self._agree_on_micro_steps(present)
        for sums in self._sums:
            sums.begin(self._micro_steps)
        super().begin_step(present)

    def _count_micro_steps(self, present: Sequence[int]) -> int:
        return len(self._micro_steps)

    def _agree_on_micro_steps(self, present: Sequence[int]) -> list[list[int | None]]:
        """Return each rank's micro-batch in each micro-step; a short batch, or a stream, lacks some."""
        is_present = torch.zeros(self._num_microbatches, dtype=torch.uint8)
        is_present[list(present)] = 1
        with translate_peer_errors():
            dist.all_reduce(is_present, group=self._world.group)
        size = self._world.world_size
        of_ranks = [[k for k in range(r, self._num_microbatches, size) if is_present[k]] for r in range(size)]
        longest = max(len(microbatches) for microbatches in of_ranks)
        return [[s[i] if i < len(s) else None for s in of_ranks] for i in range(longest)]

    def run_microbatches(self, microbatches: Sequence[MicroBatch], work: MicrobatchWork) -> None:
        with _explain_mixing(self.module):
            super().run_microbatches(microbatches, work)

    def _make_guard(self, unit: nn.Module) -> Callable[[nn.Module, Any], None]:
        """Return a hook that rejects a forward with other tensors than the unit's parameters."""
        own = {id(parameter) for parameter in _own_parameters(unit)}
        places = [
            (parameter_table(owner), prefix, name)
            for prefix, owner in self.module.named_modules()
            for name, parameter in parameter_table(owner).items()
            if id(parameter) in own
        ]

        def require_parameters(module: nn.Module, inputs: Any) -> None:
            for owner, prefix, name in places:
                # FSDP would take such a tensor for its shard of the parameter.
                if not isinstance(owner[name], nn.Parameter):
                    raise TaskError(
                        f"--strategy fsdp gathers the parameter {f'{prefix}.{name}'.lstrip('.')!r}, but the model is "
                        "called with another tensor in its place (functional_call). Use --strategy zero1."
                    )

        return require_parameters

    def _guard_outputs(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._is_called = True
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._require_end_of_loss)  # type: ignore[no-untyped-call]

    def _require_end_of_loss(self, gradient: torch.Tensor) -> None:
        # Every backward frees the parameters and scatters gradients; one in the loss would crash the process, or wait
        # for other ranks.
        if self._in_loss:
            raise TaskError(
                "--strategy fsdp runs one backward through the model for each micro-batch, but the task's loss runs "
                "another one (torch.autograd.grad or backward). Use --strategy zero1."
            )

    def _begin_microbatch(self) -> None:
        super()._begin_microbatch()
        self._in_loss = True
        self._is_called = False
        is_last = self._micro_steps_left == 0
        for sums in self._sums:
            sums.micro_steps_left = self._micro_steps_left
        for unit in self._units:
            if not self._exact:
                unit.set_requires_gradient_sync(is_last, recurse=False)
            if self._keeps:
                unit.set_reshard_after_backward(is_last, recurse=False)

    def backward(self, loss: torch.Tensor) -> None:
        self._in_loss = False
        if not self._is_called:
            raise TaskError(
                "--strategy fsdp gathers parameters on all ranks together, but for one micro-batch the loss does not "
                "call the model. Call it (add 0 * output.sum() to the loss), or use --strategy zero1."
            )
        # The exact sum reports each of its collectives itself.
        if not self._exact:
            self._world.progress_tracker.begin_collective("reduce-scatter")
        with translate_peer_errors():
            super().backward(loss)
        if not self._exact:
            self._world.progress_tracker.end_collective()

    def _mark_used(self) -> None:
        # By now the units have scattered the gradients, and zeros for parameters without one.
        pass

    def _mark_used_in_unit(self, parameters: Sequence[nn.Parameter]) -> None:
        if not self._is_dummy:
            self.reducer.mark_used(parameters)

    def close(self) -> None:
        super().close()
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            parameter.grad = None


@contextmanager
def _explain_mixing(module: nn.Module) -> Iterator[None]:
    """Explain the error of a task that uses parameters without calling the unit that gathers them.

    Raises:
        TaskError: the task does so.
    """
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        names = {id(child): name for name, child in module.named_modules() if name}
        user = "the task's loss uses parameters directly"
        trace = error.__traceback__
        while trace is not None:
            name = names.get(id(trace.tb_frame.f_locals.get("self")))
            if name is not None:
                user = f"the module {name!r} is called without the model around it"
            trace = trace.tb_next
        raise TaskError(
            f"--strategy fsdp gathers parameters while the model is called, but {user}. "
            "Compute the loss from the model's outputs, or use --strategy zero1."
        ) from error


def _is_cast(unit: nn.Module) -> bool:
    """Return whether autocast casts all parameters gathered with ``unit``."""
    own = {id(parameter) for parameter in _own_parameters(unit)}
    return all(
        isinstance(owner, CAST_MODULES)
        for owner in unit.modules()
        if any(id(parameter) in own for parameter in owner.parameters(recurse=False))
    )


def _own_parameters(unit: nn.Module) -> Sequence[nn.Parameter]:
    """Return the parameters gathered with ``unit``, without those of inner units."""
    inner = {
        id(parameter)
        for child in unit.modules()
        if isinstance(child, FSDPModule) and child is not unit
        for parameter in child.parameters()
    }
    return [parameter for parameter in unit.parameters() if id(parameter) not in inner]
