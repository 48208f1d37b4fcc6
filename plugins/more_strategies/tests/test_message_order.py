"""Sums over a network like NCCL's: each server gets the bits of the tree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from tests.parallel.distributed.message_network import LANES, Case, Network, cases, run, same_bits, total

from paceline_more_strategies import parameter_server
from paceline_more_strategies.parameter_server import ServerTransport


@given(case=cases(first_ranks_idle=2))
def test_servers_get_the_bits_of_the_tree_without_tags(case: Case) -> None:
    network = Network(len(case.work_split))
    parts = [{torch.float32: slice(0, 5)}, {torch.float32: slice(5, 13), torch.int64: slice(0, 3)}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameter_server, "start_messages", network.start_messages)
        summed = run(case, network, lambda world, plan: ServerTransport(world, plan, LANES, parts, {}))
    expected = total(case)
    for transport, part in zip(summed, parts, strict=False):
        for dtype, place in part.items():
            assert same_bits(transport.grad_buffers[0][dtype][place], expected[dtype][place])
