"""For tests that run the command in their own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def numerics() -> Iterator[None]:
    """Runs in this process set torch's threads and determinism for the whole of it."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(before[0])
    torch.use_deterministic_algorithms(before[1])
