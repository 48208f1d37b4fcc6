"""Messages between stages over NCCL, which has no tags: their tensors stay on the GPUs."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from paceline.parallel.peer_errors import translate_peer_errors
from paceline.parallel.pipeline.channel import (
    FrameReader,
    MessageAddress,
    StageChannel,
    decode,
    encode,
    fill,
    layout,
)
from paceline.parallel.world import COLLECTIVE_TIMEOUT_S, World

# A message's description and its tensors on the CPU (the states of random generators) go through gloo, its tensors on
# the GPU through NCCL, as one frame. NCCL matches the n-th send of a communicator with the n-th receive, and its
# transfers block their stream until the other side has posted them. So:
#
# * Each ordered pair of ranks has its own communicator and stream. A send and a receive never wait for each other.
# * The sender posts a frame, and then sends its description. Descriptions of a pair arrive in the order in which they
#   were sent, whatever the schedule; the receiver takes them, and posts its receives, in that order, and keeps messages
#   that it does not need yet. So both sides post in the order of the sender's schedule, and a receive is only posted
#   when its send has been: no GPU waits for an operation that a CPU has yet to enqueue.
#
# No CPU waits for a GPU: one that has the description enqueues the stage behind the receive.

_PREFIX = 5  # numbers before a description: the address, the frame's bytes, and whether it is broadcast
_IN_ORDER = MessageAddress(0, 0)  # of all descriptions: gloo matches equal tags in the order of posting


def open_channel(world: World, part: World, num_stages: int) -> StageChannel:
    """Return the channel between the stages of this rank's model replica; a collective.

    Args:
        world: all ranks.
        part: those of the replica, of which rank r has the stages r, r + R, ...

    Raises:
        PeerLostError: another rank is gone.
    """
    if world.backend == "gloo":
        return StageChannel(part)
    assert part.group is not None
    own = dist.get_process_group_ranks(part.group)
    groups: list[dist.ProcessGroup] = []
    for ranks in sorted(set(map(tuple, world.all_gather_object(own)))):
        with translate_peer_errors():
            pair = [
                dist.new_group(list(ranks), timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S), backend=world.backend)
                for _ in range(2)
            ]
        if list(ranks) == own:
            groups = pair
    to_higher, to_lower = groups
    channel = NcclStageChannel(part, to_higher, to_lower)
    world.cleanup.callback(channel.close)
    size = part.world_size
    neighbours = {(stage % size, (stage + 1) % size) for stage in range(num_stages - 1)}
    channel.connect(sorted(neighbours | {(b, a) for a, b in neighbours}))
    return channel


class _Arriving(NamedTuple):
    """A message whose description has arrived, and whose frame is received.

    Attributes:
        work: of the frame; None without tensors on the GPU.
    """

    work: dist.Work | None
    on_device: FrameReader
    description: Iterator[int]
    on_host: FrameReader


class NcclStageChannel(StageChannel):
    """Messages between the ranks of a model replica, whose tensors go from GPU to GPU.

    Args:
        world: those ranks, in the order of their stages.
        to_higher: a group of them, for messages from a rank to a higher one. NCCL creates a communicator for each pair
            of ranks of a group that exchanges messages.
        to_lower: another one, for those to a lower one.
    """

    def __init__(self, world: World, to_higher: dist.ProcessGroup, to_lower: dist.ProcessGroup) -> None:
        super().__init__(world)
        self._groups: dict[bool, dist.ProcessGroup] = {True: to_higher, False: to_lower}
        self._frames: deque[tuple[dist.Work, torch.Tensor]] = deque()  # being sent
        self._arriving: dict[tuple[int, MessageAddress], deque[_Arriving]] = {}

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Send an element from the first to the second rank of each pair; all ranks call it alike.

        NCCL creates a pair's communicator at its first message, and both CPUs wait for each other then.

        Raises:
            PeerLostError: another rank is gone.
        """
        element = torch.zeros(1, dtype=torch.uint8, device=self.world.device)
        with translate_peer_errors():
            for source, target in pairs:
                group = self._group(source, target)
                if self.world.rank == source:
                    dist.send(element, group=group, group_dst=target)
                elif self.world.rank == target:
                    dist.recv(element, group=group, group_src=source)

    def close(self) -> None:
        """Forget the groups before they are destroyed, and the messages in them."""
        self._groups.clear()
        self._frames.clear()
        self._arriving.clear()

    def send(self, values: Sequence[Any], to: int, address: MessageAddress) -> None:
        self._send(values, [to], address, is_broadcast=False)

    def broadcast(self, values: Sequence[Any], address: MessageAddress) -> None:
        others = [rank for rank in range(self.world.world_size) if rank != self.world.rank]
        self._send(values, others, address, is_broadcast=True)

    def post_recv(self, messages: Sequence[tuple[int, MessageAddress]]) -> None:
        super().post_recv([(source, _IN_ORDER) for source, _ in messages])

    def _send(
        self, values: Sequence[Any], receivers: list[int], address: MessageAddress, *, is_broadcast: bool
    ) -> None:
        description, tensors = encode(values, on_gpu=self._on_gpu)
        on_device = [tensor for tensor in tensors if tensor.is_cuda == self._on_gpu]
        on_host = [tensor for tensor in tensors if tensor.is_cuda != self._on_gpu]
        offsets, nbytes = layout(on_device, on_gpu=self._on_gpu)
        if nbytes:
            # A copy: the stage may change its tensors before they are sent.
            frame = torch.empty(nbytes, dtype=torch.uint8, device=self.world.device)
            fill(frame, 0, offsets, on_device)
            rank, group = self.world.rank, self.world.group
            with translate_peer_errors():
                if is_broadcast:
                    work = dist.broadcast(frame, group=group, group_src=rank, async_op=True)
                else:
                    work = dist.isend(frame, group=self._group(rank, receivers[0]), group_dst=receivers[0])
            assert work is not None
            while self._frames and self._frames[0][0].is_completed():
                self._frames.popleft()
            self._frames.append((work, frame))
        for receiver in receivers:
            self._send_frames([*address, nbytes, is_broadcast, *description], on_host, receiver, _IN_ORDER)

    def _receive(self, source: int, address: MessageAddress) -> list[Any]:
        arriving = self._arriving.setdefault((source, address), deque())
        while not arriving:
            self._take_next(source)
        message = arriving.popleft()
        if not arriving:
            del self._arriving[source, address]
        if message.work is not None:
            message.work.wait()  # on a GPU, the stream waits
        return decode(message.description, message.on_device, message.on_host, self.world.device)

    def _take_next(self, source: int) -> None:
        """Wait for the next description from a rank, and post the receive of its frame."""
        numbers, on_host = self._receive_frames(source, _IN_ORDER)
        stage, kind, number, nbytes, is_broadcast = itertools.islice(numbers, _PREFIX)
        frame = torch.empty(nbytes, dtype=torch.uint8, device=self.world.device)
        work: dist.Work | None = None
        if nbytes and is_broadcast:
            work = dist.broadcast(frame, group=self.world.group, group_src=source, async_op=True)
        elif nbytes:
            work = dist.irecv(frame, group=self._group(source, self.world.rank), group_src=source)
        message = _Arriving(work, FrameReader(frame), numbers, on_host)
        self._arriving.setdefault((source, MessageAddress(stage, kind, number)), deque()).append(message)

    def _wait_for_sends(self) -> None:
        super()._wait_for_sends()
        while self._frames:
            self._frames.popleft()[0].wait()  # on a GPU, the stream waits

    def _group(self, source: int, target: int) -> dist.ProcessGroup:
        return self._groups[source < target]
