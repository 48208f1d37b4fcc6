"""Who is to blame, by what each rank says of itself."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.elastic.hang import ExitedRank, HangVerdict, NoResponse, diagnose
from paceline.elastic.worker_channel import StallSnapshot


def rank(number: int, entered: int, left: int, **others: Any) -> StallSnapshot:
    known: dict[str, Any] = {
        "generation": 0,
        "step": 211,
        "stage": "step",
        "phase": "reduction",
        "exchange": "all-reduce",
        "stage_s": 31.0,
        "overdue": True,
        "still_s": 30.0,
    }
    return StallSnapshot(rank=number, collective_seq=entered, left=left, **{**known, **others})


def waits(number: int, **others: Any) -> StallSnapshot:
    return rank(number, 841, 840, **others)


def works(number: int, at: str, **others: Any) -> StallSnapshot:
    return rank(number, 840, 840, **{"phase": "forward", "where": at, **others})


def test_one_rank_in_its_own_code_holds_up_all_others() -> None:
    found = diagnose([waits(0), waits(1), waits(2), works(3, "`Faces.__getitem__` (faces.py:88)")])
    assert found == HangVerdict(
        reasons={3: "has not entered all-reduce 841 of step 212: it is in `Faces.__getitem__` (faces.py:88)"},
        blocked=(0, 1, 2),
        sentence="rank 3 has not entered all-reduce 841 of step 212: "
        "it is in `Faces.__getitem__` (faces.py:88); ranks 0-2 wait for it",
        certain=True,
    )
    assert found.root_causes == (3,)
    assert found.reasons


@pytest.mark.parametrize(
    ("others", "sentence"),
    [
        (
            {"where": "`sleep` (a.py:1)", "inside": "`wait` (b.py:2)"},
            "it is in `sleep` (a.py:1), inside `wait` (b.py:2)",
        ),
        (
            {"phase": "data", "helper": "data worker 77, which is in `Faces.__getitem__` (faces.py:88)"},
            "it waits for its data worker 77, which is in `Faces.__getitem__` (faces.py:88)",
        ),
        ({"where": "", "phase": "optimizer"}, "it is at optimizer"),
    ],
)
def test_where_the_root_cause_is(others: dict[str, Any], sentence: str) -> None:
    found = diagnose([waits(0), works(1, "", **others)])
    assert found.sentence == f"rank 1 has not entered all-reduce 841 of step 212: {sentence}; rank 0 waits for it"


def test_two_root_causes_on_two_nodes() -> None:
    reports = [waits(0), works(1, "`f` (a.py:1)"), waits(2), waits(3), works(4, "`g` (a.py:2)")]
    found = diagnose(reports, {0: "a", 1: "a", 2: "a", 3: "b", 4: "b"})
    assert found.root_causes == (1, 4)
    assert found.sentence == (
        "rank 1 on node a has not entered all-reduce 841 of step 212: it is in `f` (a.py:1); "
        "rank 4 on node b has not entered all-reduce 841 of step 212: it is in `g` (a.py:2); "
        "ranks 0 and 2 and 3 wait for it"
    )


def test_a_rank_that_does_not_answer_is_to_blame() -> None:
    found = diagnose([waits(0), NoResponse(1, "is stopped (SIGSTOP)"), waits(2)])
    assert found.sentence == ("rank 1 is stopped (SIGSTOP); ranks 0 and 2 wait for it in all-reduce 841 of step 212")
    assert (found.root_causes, found.blocked, found.certain) == ((1,), (0, 2), True)
    assert diagnose([waits(0), NoResponse(1)]).reasons == {1: "does not answer"}


def test_ranks_in_different_exchanges_wait_for_each_other() -> None:
    early = rank(2, 841, 840, exchange="all-gather", stage="evaluation")
    found = diagnose([waits(0), waits(1), early])
    assert not found.reasons
    assert found.certain
    assert found.blocked == (0, 1, 2)
    assert found.sentence.startswith(
        "the ranks wait for each other: ranks 0 and 1 are in all-reduce 841 of step 212; "
        "rank 2 is in all-gather 841 of the evaluation after step 211."
    )


def test_a_long_stage_does_not_hide_that_ranks_disagree() -> None:
    """As where rank 0 alone evaluates, and the others save, for which there are 30 minutes."""
    saving = rank(1, 841, 840, exchange="broadcast", stage="checkpoint", overdue=False)
    assert diagnose([rank(0, 841, 840, exchange="all-gather"), saving]).certain
    just_now = rank(1, 841, 840, exchange="broadcast", stage="checkpoint", overdue=False, still_s=0.2)
    assert not diagnose([rank(0, 841, 840, exchange="all-gather"), just_now]).certain
    assert not diagnose([waits(0), waits(1, overdue=False)]).certain
    assert not diagnose([waits(0), waits(1, exchange="pipeline", overdue=False)]).certain


def test_a_rank_that_left_an_evaluation_early_is_in_a_later_exchange() -> None:
    evaluating = [rank(n, 900, 899, exchange="all-gather", stage="evaluation") for n in range(2)]
    found = diagnose([*evaluating, rank(2, 901, 900)])
    assert not found.reasons
    assert "ranks 0 and 1 are in all-gather 900 of the evaluation after step 211" in found.sentence
    assert "rank 2 is in all-reduce 901 of step 212" in found.sentence


def test_a_collective_of_the_users_own_that_others_do_not_call() -> None:
    alone = works(1, "`Faces.loss` (faces.py:9)", collective="torch.distributed.barrier")
    found = diagnose([waits(0), alone])
    assert not found.reasons
    assert "rank 1 is in torch.distributed.barrier, called by `Faces.loss` (faces.py:9)" in found.sentence
    # Where somebody is still on the way there, nobody is in disagreement.
    found = diagnose([alone, works(2, "`slow` (faces.py:3)")])
    assert (found.root_causes, found.blocked) == ((2,), (1,))


def test_all_in_the_same_exchange() -> None:
    found = diagnose([waits(0), waits(1)])
    assert not found.reasons
    assert found.sentence.startswith("ranks 0 and 1 are in all-reduce 841 of step 212, and none of them")


def test_a_rank_that_has_finished_is_named_and_not_to_be_killed() -> None:
    found = diagnose([waits(0), ExitedRank(1)])
    assert not found.reasons
    assert found.certain
    assert "rank 0 is in all-reduce 841 of step 212; rank 1 has finished" in found.sentence
    found = diagnose([waits(0), ExitedRank(1), works(2, "`f` (a.py:1)")])
    assert found.root_causes == (2,)


def test_a_rank_alone() -> None:
    found = diagnose([works(0, "`f` (a.py:1)")])
    assert found.sentence == "rank 0 has been at step 212 for 31 s: it is in `f` (a.py:1)"
    assert found.root_causes == (0,)


@pytest.mark.parametrize(
    "others",
    [
        {"still_s": 2.0},  # it goes on, from one micro-batch to the next
        {"overdue": False, "stage": "checkpoint"},  # others wait for it, but it may take its time
    ],
)
def test_a_rank_that_moves_or_may_take_its_time_is_only_slow(others: dict[str, Any]) -> None:
    found = diagnose([waits(0), works(1, "`f` (a.py:1)", **others)])
    assert found.root_causes == (1,)
    assert not found.certain


def test_ranks_that_go_on_while_they_are_asked_are_not_deadlocked() -> None:
    assert not diagnose([waits(0, still_s=0.01), rank(1, 842, 841, still_s=0.0)]).certain
