"""Who is wrong, by a vote; and what tells two gradients apart."""

from __future__ import annotations

import pytest
import torch

from paceline.parallel.gradient_fingerprint import fingerprint
from paceline.training.sdc import Vote, describe, find_minority


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_flipped_bit_and_every_exchange_is_noticed(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    lane = torch.randn(300_000, generator=generator).to(dtype)  # more than a chunk
    before = fingerprint([lane, lane[:7]], 1.5)
    assert 1 <= before <= 2**48
    assert before == int(float(before)) == fingerprint([lane.clone(), lane[:7].clone()], 1.5)
    raw = lane.view(torch.uint8)
    others = [fingerprint([lane, lane[:7]], 1.25), fingerprint([lane[:7], lane], 1.5)]
    for place in torch.randint(0, len(raw), (50,), generator=generator).tolist():
        bit = place % 8
        raw[place] ^= 1 << bit
        others.append(fingerprint([lane, lane[:7]], 1.5))
        raw[place] ^= 1 << bit
    for first, second in ((0, 1), (3, 299_999), (262_143, 262_144)):
        swapped = lane.clone()
        swapped[[first, second]] = lane[[second, first]]
        others.append(fingerprint([swapped, lane[:7]], 1.5))
    assert before not in others
    assert fingerprint([torch.zeros(3)]) != fingerprint([-torch.zeros(3)])
