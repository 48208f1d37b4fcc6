"""Messages between two ranks: which library carries them, through which memory, and how both ends match them.

* Tensors on the CPU go through gloo, which matches the messages of a pair of ranks by tag.
* Tensors on a GPU go through NCCL if that is the world's backend. NCCL has no tags: the n-th tensor that a rank sends
  to another one is the n-th that this one receives from it. All messages of a call are one group call of NCCL, which
  waits on the GPU until the peers have made theirs.
* With gloo, tensors on a GPU are copied through page-locked memory, because gloo reads and writes memory of the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.world import World

_PIECE_BYTES = 64 * 2**20
"""The largest message of :func:`send_tensor`, and so the page-locked memory that it may need."""


class Message(NamedTuple):
    """A tensor that goes to another rank or comes from it.

    Attributes:
        tensor: contiguous; read if it is sent, else overwritten.
        peer: the other rank, as numbered in the world.
        tag: identifies the message among those of its pair; without effect on NCCL.
    """

    tensor: torch.Tensor
    peer: int
    tag: int = 0


class PendingMessages:
    """Messages in flight; their tensors must not be changed, and those that are received not be read, before the wait.

    Args:
        works: one for each request.
        staged: for received tensors that lie on a GPU: the tensor and its copy in page-locked memory.
    """

    def __init__(self, works: Sequence[dist.Work], staged: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
        self._works = works
        self._staged = staged

    def wait(self) -> None:
        """Wait for the messages: with NCCL it is the current stream that waits, with gloo the calling thread.

        Raises:
            PeerLostError: a peer is gone.
        """
        works, staged = self._works, self._staged
        self._works = ()
        self._staged = ()
        with translate_peer_errors():
            for work in works:
                work.wait()
        for tensor, host in staged:
            tensor.copy_(host, non_blocking=True)


def start_messages(world: World, sends: Sequence[Message] = (), receives: Sequence[Message] = ()) -> PendingMessages:
    """Start to send and receive tensors, which all lie on the CPU or all on ``world.device``.

    Empty tensors are skipped, on both ends alike. For NCCL two conditions hold:

    * For each pair of ranks, one sends its tensors in the order in which the other receives them, over all calls.
    * A call ends once its peers have made theirs, so there is one order of calls that every rank follows; a rank may
      leave out the calls in which it has no message. On a stream, later work waits for the messages only after
      :meth:`PendingMessages.wait`; the messages wait for the work that the current stream has now.

    With gloo and a GPU, the call waits until the tensors to be sent are copied to the CPU.

    Raises:
        PeerLostError: a peer is gone.
    """
    sends = [message for message in sends if message.tensor.numel()]
    receives = [message for message in receives if message.tensor.numel()]
    if not sends and not receives:
        return PendingMessages([])
    staged: list[tuple[torch.Tensor, torch.Tensor]] = []
    if world.backend == "gloo" and (sends or receives)[0].tensor.is_cuda:
        outgoing = [message._replace(tensor=_page_locked(message.tensor)) for message in sends]
        for message, copy in zip(sends, outgoing, strict=True):
            copy.tensor.copy_(message.tensor, non_blocking=True)
        if sends:
            torch.cuda.current_stream(world.device).synchronize()
        incoming = [message._replace(tensor=_page_locked(message.tensor)) for message in receives]
        staged = [(message.tensor, copy.tensor) for message, copy in zip(receives, incoming, strict=True)]
        sends, receives = outgoing, incoming
    operations = [
        dist.P2POp(operation, message.tensor, group=world.group, tag=message.tag, group_peer=message.peer)
        for operation, messages in ((dist.irecv, receives), (dist.isend, sends))
        for message in messages
    ]
    with translate_peer_errors():
        return PendingMessages(list(dist.batch_isend_irecv(operations)), staged)


def _page_locked(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


# --- Whole tensors, of which the receiver learns dtype, shape and device by another way ---


def describe_tensor(tensor: torch.Tensor) -> list[Any]:
    """Describe a tensor as JSON: its dtype, its shape, and whether it lies on a GPU.

    Both ends of a message must agree on the latter, or they wait in different libraries. An optimizer on a GPU keeps
    some of its tensors on the CPU.
    """
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.is_cuda]


def empty_tensor(description: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Return a tensor for the values of a described one; on ``device`` if that one lies on a GPU."""
    dtype, shape, on_gpu = description
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device if on_gpu else "cpu")


def send_tensor(world: World, tensor: torch.Tensor, peers: Sequence[int]) -> None:
    """Send a tensor to some ranks, which call :func:`receive_tensor`; return once it may be changed.

    Raises:
        PeerLostError: a peer is gone.
    """
    for piece in _pieces(tensor.detach().contiguous()):
        start_messages(world, sends=[Message(piece, peer) for peer in peers]).wait()


def receive_tensor(world: World, tensor: torch.Tensor, source: int) -> None:
    """Overwrite a contiguous tensor with the one that rank ``source`` sends.

    Raises:
        PeerLostError: the source is gone.
    """
    for piece in _pieces(tensor):
        start_messages(world, receives=[Message(piece, source)]).wait()


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a contiguous tensor's bytes in pieces; not every dtype can be sent."""
    content = tensor.reshape(-1).view(torch.uint8)
    for start in range(0, content.numel(), _PIECE_BYTES):
        yield content[start : start + _PIECE_BYTES]
