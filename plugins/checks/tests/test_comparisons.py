"""Which rank is wrong, by a vote; and the bits of a tensor, by which the purity guard compares."""

from __future__ import annotations

import pytest
import torch

from paceline_checks.purity import tensor_bits
from paceline_checks.silent_corruption import Vote, describe, find_minority


@pytest.mark.parametrize(
    ("votes", "world_size", "culprits"),
    [
        # The owner's first result was wrong, once; or it always computes wrongly; or the second rank does.
        ([(0, 9), (1, 5), (0, 5), (1, 5), (2, 5)], 3, [0]),
        ([(0, 9), (1, 5), (0, 9), (1, 5), (2, 5)], 3, [0]),
        ([(0, 5), (1, 9), (0, 5), (1, 8), (2, 5)], 3, [1]),
        # A third one is wrong too, while it judges.
        ([(0, 9), (1, 5), (0, 9), (1, 5), (2, 7), (3, 5), (4, 5)], 5, [0, 2]),
        # Two ranks: a mistake made once is found, two that insist cannot be told apart.
        ([(0, 9), (1, 5), (0, 5), (1, 5)], 2, [0]),
        ([(1, 9), (0, 5), (0, 5), (1, 5)], 2, [1]),
        ([(0, 9), (1, 5), (0, 9), (1, 5)], 2, []),
        # Nothing comes out the same twice, or no rank is above suspicion.
        ([(0, 1), (1, 2), (0, 3), (1, 4), (2, 5)], 3, []),
        ([(0, 9), (1, 5), (0, 5), (1, 8), (2, 5), (3, 5)], 2, []),
        ([(0, 9), (0, 5), (0, 5)], 1, [0]),
    ],
)
def test_majority_decides(votes: list[Vote], world_size: int, culprits: list[int]) -> None:
    assert find_minority(votes, world_size) == culprits


def test_sentence_names_ranks_and_machines() -> None:
    votes = [(0, 1), (2, 9)]
    assert describe([2], votes, ["a", "a", "b"], microbatch=7, step=300) == (
        "rank 2 computed another gradient for micro-batch 7 of step 300 than ranks 0 and 1: its machine (b) is not "
        "to be trusted."
    )
    assert "ranks 0 and 2 computed another" in describe([0, 2], votes, ["a", "a", "b"], microbatch=7, step=300)
    assert "2 different gradients for micro-batch 7 of step 300, and there is no majority" in describe(
        [], votes, ["a", "b"], microbatch=7, step=300
    )
    assert "one after another: its machine (a)" in describe([0], votes, ["a"], microbatch=7, step=300)


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_the_bits_of_a_tensor_do_not_depend_on_where_it_lies(first: int) -> None:
    values = torch.randn(2**15, generator=torch.Generator().manual_seed(1))
    part = torch.cat([torch.zeros(first), values])[first:]
    assert tensor_bits(part) == tensor_bits(values)
    part[-1] += 1
    assert tensor_bits(part) != tensor_bits(values)
