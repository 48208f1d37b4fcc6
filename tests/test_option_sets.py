"""What options say of themselves, and the sets that follow from it."""

from __future__ import annotations

import typing
from dataclasses import fields

import pytest

from paceline.config import RunConfig
from paceline.config.option_sets import CLASSIFICATIONS, select
from paceline.config.options import Bits, Capability, Resume, Scope, option
from paceline.config.parallelism import STRATEGIES


def test_an_option_that_is_not_classified_is_an_error_at_import() -> None:
    with pytest.raises(TypeError, match="'resume', 'bits', and 'scope'"):
        option(0, "It does something.", group="Data")  # type: ignore[call-arg]


def test_every_option_is_classified() -> None:
    assert list(CLASSIFICATIONS) == [field.name for field in fields(RunConfig)]
    for name, its in CLASSIFICATIONS.items():
        assert its.resume in typing.get_args(Resume), name
        assert its.bits in typing.get_args(Bits), name
        assert its.scope in typing.get_args(Scope), name
        assert its.needs in (None, *typing.get_args(Capability)), name
        assert set(its.strategies) <= STRATEGIES.keys(), name
        assert its.requires is None or its.requires.option in CLASSIFICATIONS, name
        assert its.replaces is None or CLASSIFICATIONS[its.replaces].replaces == name, name


def test_a_run_keeps_what_decides_its_bits() -> None:
    assert not select(lambda its: its.bits == "always" and its.resume in ("kept", "fresh"))
    assert not select(lambda its: its.bits == "never" and its.resume in ("fixed", "created"))
    assert not select(lambda its: its.scope in ("training", "data", "evaluation") and its.resume == "kept")


def test_a_place_says_nothing_of_what_a_run_computes() -> None:
    assert not select(
        lambda its: its.scope in ("place", "start", "recovery", "records") and its.bits == "always"
    )
