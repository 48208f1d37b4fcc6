"""``python -m benchmarks recovery``: what it makes of the records, and one small round of each contender."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import recovery
from benchmarks.faults import FaultScript, Kill, drawn_kills
from benchmarks.recovery import (
    RECOVERERS,
    RecoveryRow,
    RecoveryTrial,
    bench_recovery,
    judge,
    percentile,
    recovery_result,
)
from paceline.core.errors import ConfigError


def script(
    path: Path, kills: Sequence[tuple[float, int]], steps: dict[int, Sequence[tuple[float, int]]]
) -> FaultScript:
    """A script with the records of a job: (time, step) of each kill, and of each process's steps."""
    for number, (when, step) in enumerate(kills):
        (path / f"kill-{number:04d}.json").write_text(json.dumps({"time": when, "step": step}))
    for pid, lines in steps.items():
        (path / f"steps-{pid}.txt").write_text("".join(f"{when} {step}\n" for when, step in lines))
    planned = [Kill(step=step, rank=0) for _, step in kills]
    return FaultScript.write(path, planned, world_size=2, step_s=0.0)


def test_survivors_that_go_on_repeat_nothing(tmp_path: Path) -> None:
    # Step 2 ended after the kill, but it was not the step that the kill interrupted.
    records = script(tmp_path, [(12.0, 3)], {1: [(11.0, 1), (12.01, 2), (12.2, 3), (13.0, 4)]})
    trial = judge(records, [10.0], [], "abc")
    assert trial.recoveries_ms == [pytest.approx(200.0)]
    assert (trial.kills, trial.hung, trial.failed, trial.repeated) == (1, 0, 0, 0)
    assert trial.seconds == 2.0


def test_a_restart_repeats_steps_since_the_checkpoint(tmp_path: Path) -> None:
    steps = {1: [(11.0, 1), (12.0, 2), (13.0, 3)], 2: [(17.0, 2), (18.0, 3), (19.5, 4)]}
    trial = judge(script(tmp_path, [(14.0, 4)], steps), [10.0], [], "abc")
    assert trial.recoveries_ms == [5500.0]
    assert trial.repeated == 2


def test_hangs_and_failures_are_no_recoveries(tmp_path: Path) -> None:
    steps = {1: [(11.0, 1)], 2: [(32.0, 1), (33.0, 2)], 3: [(52.0, 2), (53.0, 3)]}
    trial = judge(script(tmp_path, [(12.0, 2), (34.0, 3)], steps), [10.0, 30.0, 50.0], [True, False], "abc")
    assert trial.recoveries_ms == []
    assert (trial.kills, trial.hung, trial.failed, trial.repeated) == (2, 1, 1, 2)


def test_a_line_cut_short_by_the_kill_is_left_out(tmp_path: Path) -> None:
    records = script(tmp_path, [], {1: [(11.0, 1)]})
    with (tmp_path / "steps-1.txt").open("a") as file:
        file.write("12.5")
    assert records.steps() == [(11.0, 1)]


def test_a_kill_waits_for_its_rank_its_step_and_the_full_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append(number))
    faults = FaultScript.write(tmp_path, [Kill(step=5, rank=1), Kill(step=9, rank=0)], world_size=2, step_s=0.0)
    for step, rank, world_size in ((4, 1, 2), (5, 0, 2), (5, 1, 1), (9, 0, 2)):
        faults.before_step(step, rank, world_size)
        assert killed == []
    faults.before_step(6, 1, 2)
    assert killed == [9]
    faults.before_step(6, 1, 2)
    assert killed == [9], "each kill happens once"
    FaultScript(tmp_path).before_step(9, 0, 2)
    assert killed == [9, 9]
    assert [step for _, step in faults.killed_at()] == [6, 9]


def test_kills_are_drawn_from_the_seed_and_far_enough_apart() -> None:
    kills = drawn_kills(3, 50, world_size=4, spacing=20)
    assert kills == drawn_kills(3, 50, world_size=4, spacing=20)
    assert kills != drawn_kills(4, 50, world_size=4, spacing=20)
    assert {kill.rank for kill in kills} == {0, 1, 2, 3}
    steps = [0, *(kill.step for kill in kills)]
    assert all(20 <= later - earlier < 30 for earlier, later in itertools.pairwise(steps))


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(n) for n in range(1, 201)]
    assert (percentile(values, 50), percentile(values, 99), percentile(values, 100)) == (100, 198, 200)
    assert percentile([7.0], 99) == 7.0


def trial(recoveries_ms: Sequence[float], sha: str = "same", **changes: int) -> RecoveryTrial:
    counts = {"hung": 0, "failed": 0, "repeated": 0, **changes}
    kills = len(recoveries_ms) + counts["hung"] + counts["failed"]
    return RecoveryTrial(kills=kills, recoveries_ms=recoveries_ms, seconds=20.0, model_sha256=sha, **counts)


def test_the_report_counts_over_rounds_and_says_which_bars_are_met(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clean = RecoveryTrial(kills=0, recoveries_ms=[], hung=0, failed=0, repeated=0, seconds=10.0, model_sha256="same")
    rows = [
        RecoveryRow(
            recoverer=RECOVERERS["torchrun"],
            trials=[trial([2000.0], "other", hung=1, repeated=12)],
            undisturbed=clean,
        ),
        RecoveryRow(recoverer=RECOVERERS["paceline-torchrun"], trials=[trial([3000.0] * 2)], undisturbed=clean),
        RecoveryRow(
            recoverer=RECOVERERS["paceline-inplace"],
            trials=[trial([40.0, 60.0]), trial([1500.0, 50.0])],
            undisturbed=clean,
        ),
    ]
    settings = {"nproc": 2, "rounds": 2, "seed": 0, "hang_after_s": 20.0}
    result = recovery_result(settings, rows)

    assert command.show(result, json=True) == 0
    document = json.loads(capsys.readouterr().out)
    stock, _, inplace = document["contenders"]
    assert (stock["kills"], stock["came_back"], stock["hung"], stock["same_weights"]) == (2, 1, 1, 0)
    assert inplace["recovery_ms"] == {"median": 55.0, "p99": 1500.0, "all": [40.0, 50.0, 60.0, 1500.0]}
    assert inplace["goodput"] == 0.5
    assert list(document["bars"].values()) == [True, True, False]

    assert command.show(result, markdown=True) == 0
    shown = capsys.readouterr().out
    assert "| stock torchrun | 1 of 2 | 1 | 2,000 ms | 2,000 ms | 12 | 0 of 1 | 50% |" in shown
    assert "in place, p99 at most 1000 ms: NOT met." in shown


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nproc": 1}, "--nproc must be between 2 and 4, but is 1"),
        ({"kills": 0}, "--kills must be between 1 and 10000, but is 0"),
        ({"rounds": 0}, "--rounds must be between 1"),
        ({"hang_after_s": 1.0}, "--hang-after must be between 5 and 3600, but is 1.0"),
    ],
)
def test_bad_numbers_are_refused(changes: dict[str, float], message: str) -> None:
    arguments = {"nproc": 2, "kills": 1, "rounds": 1, "hang_after_s": 20.0, **changes}
    with pytest.raises(ConfigError, match=message):
        bench_recovery(contenders=["torchrun"], seed=0, progress=lambda line: None, **arguments)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_kill_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "SPACING", 20)
    lines: list[str] = []
    result = bench_recovery(
        contenders=list(RECOVERERS),
        nproc=2,
        kills=1,
        rounds=1,
        seed=0,
        hang_after_s=60,
        progress=lines.append,
    )
    stock, torchrun, inplace = result.as_json()["contenders"]
    assert stock["kills"] == stock["came_back"] + stock["hung"] + stock["failed"] == 1
    for row in (torchrun, inplace):
        assert (row["kills"], row["came_back"], row["same_weights"]) == (1, 1, 1)
    assert inplace["steps_repeated"] == 0
    assert len(lines) == 5
