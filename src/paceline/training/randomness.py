"""Randomness is keyed, not consumed: every draw depends on (seed, what it is for), never on history."""

from __future__ import annotations

import random

import numpy as np
import torch

from paceline.data.permutation import derive_key

# Tags 1 to 9 belong to the order of the data.
_MODEL, _SHARD, _EVALUATION, _VERIFICATION, _ADAPTERS = 11, 12, 13, 14, 15


def seed_model(seed: int) -> None:
    """Before the model is built: every rank builds the same."""
    _seed(derive_key(seed, _MODEL))


def seed_adapters(seed: int) -> None:
    """Before adapters are put around a model's layers; what was imported or drawn before is no matter."""
    _seed(derive_key(seed, _ADAPTERS))


def seed_shard(seed: int, step: int, shard: int) -> None:
    """Before a shard's forward: dropout is the same whichever rank computes it, and whenever."""
    _seed(derive_key(seed, _SHARD, step, shard))


def seed_evaluation(seed: int, block: int) -> None:
    """Before an evaluation batch."""
    _seed(derive_key(seed, _EVALUATION, block))


def verification_key(seed: int, step: int) -> int:
    """Decides which shard of a step is verified, and by whom: a 64-bit number, and no state."""
    return derive_key(seed, _VERIFICATION, step)


def _seed(key: int) -> None:
    # torch.manual_seed() also looks for every other kind of accelerator: 65 us against 1 us.
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
