"""What tells two gradients apart."""

from __future__ import annotations

import pytest
import torch

from paceline.parallel.grad_buffers import fingerprint


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
