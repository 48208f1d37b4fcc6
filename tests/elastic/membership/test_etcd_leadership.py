"""Who leads by etcd, and which groups may be formed: scripted cases, a search of small worlds, and random walks."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
from tests.elastic.membership.etcd_world import EtcdWorld
from tests.elastic.membership.test_leadership import search, walk


@pytest.mark.integration
@pytest.mark.parametrize(
    "world",
    [
        partial(EtcdWorld.on_etcd, "ab", "ab", crashes=1, cuts=1, heals=1, forms=2),
        partial(EtcdWorld.on_etcd, "ab", "ab", cuts=1, heals=1, outages=1, forms=1),
        partial(EtcdWorld.on_etcd, "ab", "b", expiries=2, cuts=1, forms=1),
    ],
    ids=["crash", "outage", "expiry"],
)
def test_interleavings(world: Callable[..., EtcdWorld]) -> None:
    search(world(), at_least=300, at_most=4000, settle_every=10)


@pytest.mark.parametrize(
    "world",
    [
        partial(EtcdWorld.on_etcd, "abc", "abc", crashes=1, cuts=3, heals=4, haste=4, forms=8, dismissals=1),
        partial(EtcdWorld.on_etcd, "abc", "bc", crashes=1, cuts=3, heals=4, haste=4, forms=8, outages=3),
        partial(EtcdWorld.on_etcd, "abcd", "abcd", cuts=4, heals=6, haste=4, forms=8, expiries=3, outages=2),
        partial(EtcdWorld.on_etcd, "abcde", "bcd", crashes=2, cuts=4, heals=6, haste=4, forms=8, expiries=2),
    ],
    ids=["three", "three-one-idle", "four", "five-two-idle"],
)
def test_random_walks(world: Callable[..., EtcdWorld]) -> None:
    for seed in range(60):
        walk(world(), random.Random(seed), steps=150)
