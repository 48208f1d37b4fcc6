"""Every name of torch that Paceline uses and torch does not promise to keep.

A new release of torch is supported once each of these exists and means the same; no other file names one. The names in
``_ON_USE`` are imported on use, because their modules cost a process half a second.
"""

from __future__ import annotations

import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore as HashStore  # these five torch.distributed has too, but not for mypy
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._C._distributed_c10d import _broadcast_coalesced
from torch._C._distributed_c10d import set_debug_level_from_env as set_debug_level_from_env
from torch._prims_common import is_non_overlapping_and_dense_or_false as is_non_overlapping_and_dense_or_false
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed import distributed_c10d
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
    from torch.distributed.pipelining._backward import construct_reverse_graph as construct_reverse_graph
    from torch.distributed.pipelining._backward import stage_backward_input as stage_backward_input
    from torch.distributed.pipelining._backward import stage_backward_weight as stage_backward_weight
    from torch.testing._internal.distributed.fake_pg import FakeStore as FakeStore

OLDEST, NEWEST_TESTED = (2, 11), (2, 14)
"""The releases of torch that the tests have passed with: from the oldest that Paceline takes, to the newest."""

_ON_USE = {
    # fsdp: the classes of an all-gather and a reduce-scatter that replace torch's.
    "AllGather": ("torch.distributed.fsdp._fully_shard._fsdp_api", "AllGather"),
    "ReduceScatter": ("torch.distributed.fsdp._fully_shard._fsdp_api", "ReduceScatter"),
    # sharded checkpoints: where a shard is in the whole tensor.
    "local_shape_and_offset": ("torch.distributed.tensor._utils", "compute_local_shape_and_global_offset"),
    # zero-bubble pipelines: the two halves of a backward, and the graph that tells whether they make the whole.
    "grad_fn_of": ("torch.distributed.pipelining._backward", "_get_grad_fn_or_grad_acc"),
    "construct_reverse_graph": ("torch.distributed.pipelining._backward", "construct_reverse_graph"),
    "stage_backward_input": ("torch.distributed.pipelining._backward", "stage_backward_input"),
    "stage_backward_weight": ("torch.distributed.pipelining._backward", "stage_backward_weight"),
    # the linter: one of two ranks, without the other.
    "FakeStore": ("torch.testing._internal.distributed.fake_pg", "FakeStore"),
}


def __getattr__(name: str) -> Any:
    if name not in _ON_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, there = _ON_USE[name]
    return getattr(import_module(module), there)


def describe_untested(version: str) -> str | None:
    """Return a line about a release of torch that is newer than those tested; None for ``"2.13.0+cu130"``, say."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) <= NEWEST_TESTED:
        return None
    oldest, newest = (f"{major}.{minor}" for major, minor in (OLDEST, NEWEST_TESTED))
    return f"torch {version} is newer than those that Paceline is tested with ({oldest} to {newest})"


# --- Tensors ---

# One call for a list of tensors, as torch's own optimizers make it: twice as fast as a loop, with its bits.
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm

# Activation checkpointing keeps their results, which cost the most.
ATTENTION_FORWARDS = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention,
)
# torch counts the floating-point operations of a GPU's attention only; planning counts those of the CPU's.
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def count_writes(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return how often each tensor was changed in place; autograd adds to a gradient in place."""
    return [tensor._version for tensor in tensors]


class PartsGradScaler(torch.amp.GradScaler, ABC):
    """A gradient scaler that takes not the gradients of an optimizer's parameters, but parts of them."""

    @abstractmethod
    def parts(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """Return tensors with the parts as their ``grad``."""

    def found_infs(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """Return, for each device, 1.0 if a gradient that was unscaled there is not finite; a change decides a step."""
        return list(self._found_inf_per_device(optimizer).values())

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        held = SimpleNamespace(param_groups=[{"params": self.parts(optimizer)}])
        unscaled: dict[torch.device, torch.Tensor] = super()._unscale_grads_(
            cast(Optimizer, held), inv_scale, found_inf, allow_fp16
        )
        # torch's does not step an optimizer whose gradients it has not inspected.
        return unscaled or {found_inf.device: found_inf}


# --- Modules ---

# The base classes of layers with running statistics, and of convolutions; torch has no public ones.
BatchNorm = _BatchNorm
NormBase = _NormBase
ConvNd = _ConvNd


def parameter_table(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters; a change there changes the module, even to another class of tensor."""
    return module._parameters


def buffer_table(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return a module's own buffers; a change of the table changes the module."""
    return module._buffers


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of the own buffers that a ``state_dict`` leaves out."""
    return module._non_persistent_buffers_set


def has_gradient_hook(tensor: torch.Tensor) -> bool:
    """Return whether ``register_hook`` was called."""
    return bool(tensor._backward_hooks)


def map_tensors(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer, as ``Module.to`` does, which cannot leave some of them where they are."""
    module._apply(change)  # type: ignore[no-untyped-call]


# torch.fx writes a call to a function of this name for an argument that is traced as None.
ASSERT_IS_NONE = "_assert_is_none"

# Loggers whose messages do not concern users.
PYTREE_LOGGER = "torch.utils._pytree"
REDISTRIBUTE_LOGGER = "torch.distributed.tensor._redistribute"


def preload_deterministic_algorithms() -> None:
    """Import what ``torch.use_deterministic_algorithms`` imports, which takes more than a second."""
    import torch._inductor.config  # noqa: F401


def clear_cublas_workspaces() -> None:
    """Free cuBLAS's workspaces; torch makes new ones, of the size that it would choose now."""
    torch._C._cuda_clearCublasWorkspaces()


# --- Process groups ---

# torch 2.14 calls them so, and warns of the other names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def restart_group_names() -> None:
    """Let the next process group have the first name again.

    The keys contain the group's name, a counter that rises on failures too, so members that failed at different points
    would never meet again.
    """
    distributed_c10d._world.group_count = 0


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    """Set the time limit of a group's later collectives; ``init_process_group``'s also limits how long it waits."""
    if hasattr(dist, "set_timeout"):  # from torch 2.14 on
        dist.set_timeout(timeout, group)
    else:
        distributed_c10d._set_pg_timeout(timeout, group)


def abort_groups() -> None:
    """Abort all groups, together; to destroy one of NCCL would first wait for what is pending."""
    distributed_c10d._abort_process_group()


def broadcast_coalesced(
    group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], bucket_bytes: int, source: int
) -> None:
    """Broadcast tensors from rank ``source``, many in a message."""
    _broadcast_coalesced(group, list(tensors), bucket_bytes, source)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the mesh with all its axes as one; a collective."""
    return mesh._flatten(name)


def forget_groups(mesh: DeviceMesh) -> None:
    """Let a mesh forget its groups: DTensor's caches keep every mesh for ever, and the groups would never end."""
    mesh._pg_registry.clear()


def gloo_group(
    store: Store, rank: int, ranks: int, timeout: timedelta, *, hostname: str | None, interface: str | None
) -> Any:
    """Return a gloo group that is not the process's: one of a thread, say. The backend listens at one of the two."""
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    if hostname is not None:
        options._devices = [ProcessGroupGloo.create_device(hostname=hostname)]
    elif interface is not None:
        options._devices = [ProcessGroupGloo.create_device(interface=interface)]
    else:
        options._devices = [ProcessGroupGloo.create_default_device()]
    return ProcessGroupGloo(store, rank, ranks, options)


def nccl_group(store: Store, rank: int, ranks: int, timeout: timedelta) -> Any:
    """Return an NCCL group that is not the process's, on the current device."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(store, rank, ranks, options)


def all_gather_into(group: Any, target: torch.Tensor, source: torch.Tensor) -> dist.Work:
    """Gather ``source`` of all ranks of a group that was made above."""
    return group._allgather_base(target, source)  # type: ignore[no-any-return]


def reduce_scatter_into(group: Any, target: torch.Tensor, source: torch.Tensor) -> dist.Work:
    """Sum the ranks' parts for each rank, in a group that was made above."""
    return group._reduce_scatter_base(target, source)  # type: ignore[no-any-return]


def start_coalescing(group: Any) -> None:
    """Let NCCL begin the following sends and receives together; one by one, each would wait for its peer's."""
    group._start_coalescing()


def end_coalescing(group: Any) -> dist.Work:
    """Begin what was called since :func:`start_coalescing`."""
    return group._end_coalescing()  # type: ignore[no-any-return]


# --- DDP and FSDP ---


def call_after_backward(call: Callable[[], None]) -> None:
    """Call a function once the current backward has accumulated all gradients; functions are called in order."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def silence_search_warning(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Let DDP not warn that a model has no unused parameters, which no user can know of the next step; a collective.

    torch warns once a process, and in an ``apply`` it leaves the warning to Python, not to the terminal.
    """
    used = DistributedDataParallel(nn.Linear(1, 1, device=device), process_group=group, find_unused_parameters=True)

    class Forward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                return cast(torch.Tensor, used(inputs)).detach()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Forward.apply(torch.zeros(1, 1, device=device))  # type: ignore[no-untyped-call]


def leave_buffers(ddp: DistributedDataParallel) -> None:
    """Let DDP not broadcast its buffers in each forward, only once in its constructor.

    From torch 2.13 on its constructor has an option for that, and this attribute still decides it; the option of older
    ones would leave out the first broadcast too.
    """
    assert hasattr(ddp, "broadcast_buffers")
    ddp.broadcast_buffers = False


def watch_gradients(unit: FSDPModule, used: Callable[[list[nn.Parameter]], None]) -> None:
    """Let an FSDP unit reduce zeros for a parameter without a gradient, so that all ranks reduce the same.

    torch 2.12 has a method for the zeros, which does not tell for which parameters it reduces them.

    Args:
        unit: the unit.
        used: called after each backward with the sharded parameters that have a gradient, of this backward or of one
            before it that was not reduced.
    """
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is not None:
        # The class's, which another watch may have replaced.
        post_backward = partial(type(group).post_backward, group)
        group.post_backward = _with_zero_gradients(group, post_backward, used)  # type: ignore[method-assign]


def keep_order_of_input_gradients(unit: FSDPModule) -> None:
    """Let an FSDP unit add the gradients of its inputs in the order in which autograd adds them without FSDP.

    torch puts a node between a unit and its inputs that ends the unit's backward. It adds the gradients from inside the
    unit first, and its sum to those from outside, which rounds otherwise if both are more than one. A hook on the input
    that was computed last ends it as well: autograd runs nodes in the reverse order of forward, so all of the unit's
    nodes have run by then. Inputs that no operation has computed have no such place in the order: they keep the node.
    """
    group = unit._get_fsdp_state()._fsdp_param_group
    if group is not None:
        put_node = group._register_post_backward_hook
        group._register_post_backward_hook = _hook_on_last_input(group, put_node)  # type: ignore[method-assign]
        assert isinstance(unit, nn.Module)
        unit.register_forward_hook(_return_no_input, prepend=True, with_kwargs=True)


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _hook_on_last_input(group: Any, put_node: Callable[..., _Arguments]) -> Callable[..., _Arguments]:
    def register(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:  # backward recomputes the forward
            return args, kwargs
        inputs = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        last = max((tensor for tensor in inputs if tensor.grad_fn), key=_position_in_forward, default=None)
        if last is None:
            return put_node(args, kwargs)
        last.register_hook(lambda _: group.post_backward())  # type: ignore[no-untyped-call]
        return args, kwargs

    return register


def _return_no_input(unit: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
    """Return views of outputs that are inputs: the hook that begins a unit's backward would run after it has ended."""
    inputs = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    return tree_map(lambda leaf: leaf.view_as(leaf) if id(leaf) in inputs else leaf, outputs)


def _position_in_forward(tensor: torch.Tensor) -> int:
    assert tensor.grad_fn is not None
    return tensor.grad_fn._sequence_nr()


def _with_zero_gradients(
    group: Any, post_backward: Callable[..., None], used: Callable[[list[nn.Parameter]], None]
) -> Callable[..., None]:
    def put_zeros_and_reduce(*arguments: Any) -> None:
        with_gradient = []
        for parameter in group.fsdp_params:
            # Freed parameters have had no forward since the last reduction.
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is None or not unsharded.requires_grad:
                continue
            if unsharded.grad is not None or getattr(parameter, "unsharded_accumulated_grad", None) is not None:
                with_gradient.append(parameter.sharded_param)
            elif group.reduce_grads:
                unsharded.grad = torch.zeros_like(unsharded)
        used(with_gradient)
        post_backward(*arguments)

    return put_zeros_and_reduce
