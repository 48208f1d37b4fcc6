"""Sums over a network like NCCL's: every rank gets the bits of the tree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from tests.parallel.distributed.message_network import BUCKETS, LANES, Case, Network, cases, run, same_bits, total

from paceline.parallel import transports
from paceline.parallel.reduction_tree import ReductionPlan
from paceline.parallel.transports import GroupTransport, Transport


class Stream:
    """A stream on which everything has run already."""

    def wait_stream(self, stream: Any) -> None: ...


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    yield


@pytest.mark.parametrize("during_backward", [False, True], ids=["gloo", "nccl"])
@given(case=cases())
def test_every_rank_gets_the_bits_of_the_tree_without_tags(during_backward: bool, case: Case) -> None:
    network = Network(len(case.work_split))

    def build(world: Any, plan: ReductionPlan) -> Transport:
        transport = GroupTransport(world, plan, LANES, BUCKETS)
        if during_backward:
            transport._stream = Stream()  # type: ignore[assignment]
        return transport

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transports, "start_messages", network.start_messages)
        patch.setattr(torch.cuda, "current_stream", lambda device: Stream())
        patch.setattr(torch.cuda, "stream", on_stream)
        summed = run(case, network, build)
    expected = total(case)
    for transport in summed:
        for dtype, flat_buffer in transport.grad_buffers[0].items():
            assert same_bits(flat_buffer, expected[dtype])
