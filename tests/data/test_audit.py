from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import cyclopts
import pytest

from paceline.cli.audit import audit as audit_command
from paceline.core.errors import RunDirectoryError
from paceline.core.options import Shuffle
from paceline.data.audit import audit
from paceline.data.ledger import LedgerWriter, ledger_path
from paceline.data.order import DeterministicSampler
from paceline.runs.directory import RunDirectory

ORDER = DeterministicSampler(1003, 100, 4, seed=7)
STEPS = ORDER.steps_per_epoch  # 11: the last one has 3 samples


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    directory.write_manifest({"task": "fashion-mnist"})
    return directory


def checksum(order: DeterministicSampler, epoch: int, step: int) -> int:
    microbatches = range(len(order.microbatch_bounds(step)))
    return sum(
        zlib.crc32(order.microbatch_indices(epoch, step, microbatch).astype("<i8").tobytes())
        for microbatch in microbatches
    )


def write(
    run: RunDirectory,
    steps: Iterable[int],
    *,
    order: DeterministicSampler = ORDER,
    generation: int = 0,
    parent: int | None = None,
    ranks: int | list[int] = 2,
) -> None:
    """Commit steps, counted over the epochs; step n leaves the state version n + 1."""
    with closing(LedgerWriter(run.ledger, order, generation=generation, parent_version=parent)) as writer:
        for number in steps:
            epoch, step = divmod(number, order.steps_per_epoch)
            start, stop = order.batch_range(step)
            writer.append(
                version=number + 1,
                epoch=epoch,
                step=step,
                start=start,
                stop=stop,
                ranks=ranks,
                checksum=checksum(order, epoch, step),
            )


def edit(run: RunDirectory, change: Callable[[list[str]], list[str]], generation: int = 0) -> None:
    """Change the lines of a ledger file; line n is step n - 1."""
    path = ledger_path(run.ledger, generation)
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def replace_fields(line: str, **fields: object) -> str:
    return json.dumps({**json.loads(line), **fields}) + "\n"


@pytest.mark.parametrize(
    "order",
    [
        ORDER,
        DeterministicSampler(1001, 100, 4, seed=7),
        DeterministicSampler(1000, 96, 12, seed=1, shuffle=Shuffle(16)),
        DeterministicSampler(50, 96, 12, seed=1, shuffle=Shuffle(0)),
    ],
)
def test_a_whole_run_is_clean(run: RunDirectory, order: DeterministicSampler) -> None:
    write(run, range(3 * order.steps_per_epoch), order=order, ranks=[0, 1, 3])
    report = audit(run)
    assert report.clean
    assert [(e.epoch, e.once, e.repeated, e.never, e.not_yet) for e in report.epochs] == [
        (epoch, order.num_samples, 0, 0, 0) for epoch in range(3)
    ]
    assert report.steps == 3 * order.steps_per_epoch
    assert {e.world_sizes for e in report.epochs} == {(3,)}
    assert report.verdict == "Clean: every sample of 3 epochs seen exactly once."


def test_epochs_longer_than_a_chunk_are_clean(run: RunDirectory) -> None:
    order = DeterministicSampler(150_000, 1000, 4, seed=7)
    write(run, range(2 * order.steps_per_epoch), order=order)
    report = audit(run)
    assert report.clean
    assert [e.once for e in report.epochs] == [150_000, 150_000]


def test_the_last_epoch_may_be_unfinished(run: RunDirectory) -> None:
    write(run, range(STEPS + 4))
    report = audit(run)
    assert report.clean
    assert (report.epochs[1].once, report.epochs[1].never, report.epochs[1].not_yet) == (400, 0, 603)
    assert report.verdict == (
        "Clean so far: every sample of 1 epoch and 400 of the 1,003 samples of epoch 1 seen exactly once."
    )


def test_an_earlier_epoch_may_not(run: RunDirectory) -> None:
    write(run, [*range(STEPS - 2), *range(STEPS, 2 * STEPS)])
    report = audit(run)
    assert not report.clean
    assert (report.epochs[0].never, report.epochs[0].not_yet) == (103, 0)
    assert report.epochs[0].missing_steps == ((STEPS - 2, STEPS - 1),)


def test_a_missing_step_is_found(run: RunDirectory) -> None:
    write(run, range(2 * STEPS))
    edit(run, lambda lines: lines[:4] + lines[5:])
    report = audit(run)
    assert not report.clean
    first, second = report.epochs
    assert first.missing_steps == ((3, 3),)
    assert (first.once, first.never, first.repeated, first.steps) == (903, 100, 0, STEPS - 1)
    assert second.findings == ()
    assert report.verdict == "Not clean: epoch 0: 1 step (3) missing; epoch 0: 100 samples never seen."


def test_a_missing_step_of_an_unfinished_epoch_is_told_from_those_to_come(run: RunDirectory) -> None:
    write(run, [0, 1, 4, 5])
    (epoch,) = audit(run).epochs
    assert epoch.missing_steps == ((2, 3),)
    assert (epoch.once, epoch.never, epoch.not_yet) == (400, 200, 403)


def test_a_repeated_step_is_found(run: RunDirectory) -> None:
    write(run, range(STEPS))
    edit(run, lambda lines: [*lines[:4], lines[3], *lines[4:]])
    report = audit(run)
    assert not report.clean
    (epoch,) = report.epochs
    assert epoch.repeated_steps == ((2, 2),)
    assert (epoch.once, epoch.repeated, epoch.never, epoch.steps) == (903, 100, 0, STEPS)
    assert epoch.misplaced_steps == ()


def test_a_step_repeated_at_the_end_is_found(run: RunDirectory) -> None:
    write(run, [*range(STEPS), STEPS - 1])
    (epoch,) = audit(run).epochs
    assert epoch.repeated_steps == ((STEPS - 1, STEPS - 1),)
    assert (epoch.once, epoch.repeated) == (1000, 3)


def test_a_wrong_checksum_is_found(run: RunDirectory) -> None:
    write(run, range(2 * STEPS))
    edit(
        run,
        lambda lines: [replace_fields(line, c=1) if n in (3, 4, 14) else line for n, line in enumerate(lines)],
    )
    report = audit(run)
    assert not report.clean
    assert [e.checksum_mismatches for e in report.epochs] == [((2, 3),), ((2, 2),)]
    assert "epoch 1: 1 step (2) read other samples than the order gives" in report.findings


def test_samples_of_another_epoch_are_found(run: RunDirectory) -> None:
    write(run, range(STEPS))
    wrong = checksum(ORDER, 1, 5)
    edit(run, lambda lines: [*lines[:6], replace_fields(lines[6], c=wrong), *lines[7:]])
    assert audit(run).epochs[0].checksum_mismatches == ((5, 5),)


def test_another_seed_is_found(run: RunDirectory) -> None:
    write(run, range(STEPS))
    header = {**json.loads(ledger_path(run.ledger, 0).read_text().splitlines()[0])}
    header["order"]["seed"] = 8
    edit(run, lambda lines: [json.dumps(header) + "\n", *lines[1:]])
    assert audit(run).epochs[0].checksum_mismatches == ((0, STEPS - 1),)


def test_other_positions_than_the_orders_are_found(run: RunDirectory) -> None:
    write(run, range(STEPS))
    edit(run, lambda lines: [*lines[:3], replace_fields(lines[3], a=150), *lines[4:]])
    (epoch,) = audit(run).epochs
    assert epoch.misplaced_steps == ((2, 2),)
    # Positions 150 to 199 were seen twice, and step 2 never came in its place.
    assert (epoch.once, epoch.repeated, epoch.never) == (953, 50, 0)


def test_a_step_that_the_epoch_does_not_have_is_found(run: RunDirectory) -> None:
    write(run, range(STEPS))
    edit(run, lambda lines: [*lines, replace_fields(lines[-1], v=99, t=STEPS, a=1003, b=10**15)])
    (epoch,) = audit(run).epochs
    assert epoch.misplaced_steps == ((STEPS, STEPS),)
    assert (epoch.once, epoch.repeated) == (1003, 0)


def test_steps_out_of_turn_are_found(run: RunDirectory) -> None:
    write(run, range(STEPS))
    edit(run, lambda lines: [*lines[:3], lines[5], lines[3], lines[4], *lines[6:]])
    (epoch,) = audit(run).epochs
    assert epoch.misplaced_steps == ((2, 3),)
    assert epoch.missing_steps == ()
    assert (epoch.once, epoch.steps) == (1003, STEPS)


def test_a_state_version_that_does_not_rise_is_found(run: RunDirectory) -> None:
    write(run, range(STEPS))
    edit(run, lambda lines: [*lines[:3], replace_fields(lines[3], v=2), *lines[4:]])
    assert audit(run).epochs[0].misplaced_steps == ((2, 2),)


def test_epochs_left_out_and_returned_to_are_found(run: RunDirectory) -> None:
    write(run, [*range(STEPS), *range(3 * STEPS, 4 * STEPS), 5])
    report = audit(run)
    assert report.missing_epochs == ((1, 2),)
    assert report.stray_steps == ((0, 5),)
    assert report.findings == (
        "epochs 1 to 2: no steps",
        "epoch 0: step 5 came after a later epoch had begun",
    )


def test_recomputed_steps_are_counted_apart(run: RunDirectory) -> None:
    write(run, range(8))
    write(run, range(5, STEPS + 3), generation=1, parent=5, ranks=3)
    write(run, range(STEPS + 2, 2 * STEPS), generation=2, parent=STEPS + 2, ranks=1)
    report = audit(run)
    assert report.clean
    assert report.generations == 3
    assert (report.recomputed_steps, report.recomputed_samples) == (4, 400)
    assert [e.once for e in report.epochs] == [1003, 1003]
    assert [e.world_sizes for e in report.epochs] == [(2, 3), (1, 3)]


def test_a_generation_that_skipped_steps_is_found(run: RunDirectory) -> None:
    write(run, range(5))
    write(run, range(7, STEPS), generation=1, parent=7)
    assert audit(run).epochs[0].missing_steps == ((5, 6),)


def test_a_crashed_run_is_clean_as_far_as_it_went(run: RunDirectory) -> None:
    write(run, range(6))
    with ledger_path(run.ledger, 0).open("ab") as file:
        file.write(b'{"v":7,"e":0,"t":6,"a":6')
    report = audit(run)
    assert report.clean
    assert (report.epochs[0].once, report.epochs[0].not_yet) == (600, 403)


def test_a_ledger_without_steps_is_clean_but_empty(run: RunDirectory) -> None:
    write(run, [])
    report = audit(run)
    assert report.clean
    assert report.verdict == "Clean, but empty: no step has been committed yet."


def test_a_ledger_that_lost_its_end_is_found_by_the_result(run: RunDirectory) -> None:
    write(run, range(STEPS))
    run.write_result({"steps": STEPS})
    assert audit(run).clean
    edit(run, lambda lines: lines[:-2])
    report = audit(run)
    assert not report.clean
    assert report.findings == ("result.json claims 11 steps, the ledger has 9",)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"steps": "11"}'])
def test_a_damaged_result_is_an_error(run: RunDirectory, content: str) -> None:
    write(run, range(STEPS))
    run.result.write_text(content)
    with pytest.raises(RunDirectoryError, match=r"result\.json"):
        audit(run)


def write_stream(run: RunDirectory, steps: list[tuple[int, int, int, int]]) -> None:
    with closing(LedgerWriter(run.ledger, None, generation=0, parent_version=None)) as writer:
        for version, (epoch, step, start, stop) in enumerate(steps, start=1):
            writer.append(version=version, epoch=epoch, step=step, start=start, stop=stop, ranks=2, checksum=version)


def test_a_streams_steps_follow_each_other(run: RunDirectory) -> None:
    write_stream(run, [(0, 0, 0, 10), (0, 1, 10, 20), (0, 2, 20, 24), (1, 0, 24, 34)])
    report = audit(run)
    assert report.clean
    assert [(e.once, e.num_samples) for e in report.epochs] == [(24, None), (10, None)]
    assert not report.checksums_compared
    assert report.verdict.startswith("Clean: 34 samples were taken from this stream, and its 4 steps follow")
    assert "Which samples these were, and whether they are all, was not checked" in report.verdict


def test_a_streams_gaps_and_overlaps_are_found(run: RunDirectory) -> None:
    write_stream(run, [(0, 0, 0, 10), (0, 1, 5, 20), (0, 3, 30, 40)])
    (epoch,) = audit(run).epochs
    assert (epoch.once, epoch.repeated, epoch.never) == (25, 5, 10)
    assert epoch.missing_steps == ((2, 2),)
    assert epoch.misplaced_steps == ((1, 1), (3, 3))


def test_a_streams_steps_that_are_missing_at_an_epochs_end_are_found(run: RunDirectory) -> None:
    write_stream(run, [(0, 0, 0, 10), (1, 0, 24, 34), (1, 1, 34, 44)])
    report = audit(run)
    assert not report.clean
    assert [(e.once, e.never, e.misplaced_steps) for e in report.epochs] == [(10, 0, ()), (20, 14, ((0, 0),))]


def test_what_is_no_run_or_has_no_ledger_is_an_error(run: RunDirectory, tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        audit(RunDirectory(tmp_path / "elsewhere"))
    with pytest.raises(RunDirectoryError, match="holds no ledger"):
        audit(run)


def test_the_verdict_stays_short(run: RunDirectory) -> None:
    write(run, range(20 * STEPS))
    edit(run, lambda lines: [line for n, line in enumerate(lines) if n % STEPS != 3])
    report = audit(run)
    assert len(report.findings) == 40
    assert report.verdict.endswith("; and 34 more.")


def test_the_command_prints_a_table_and_the_verdict(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, range(STEPS + 5))
    write(run, range(STEPS + 4, 2 * STEPS), generation=1, parent=STEPS + 4, ranks=4)
    assert audit_command(run.path) == 0
    printed = capsys.readouterr().out
    assert "1,003" in printed
    assert "2, 4" in printed
    assert "1 step (100 samples) undone by a restart" in printed
    assert "Clean: every sample of 2 epochs seen exactly once." in printed


def test_the_commands_exit_code_tells_what_is_wrong(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, [0, 1, 3])
    assert audit_command(run.path) == 1
    assert "Not clean: epoch 0: 1 step (2) missing" in capsys.readouterr().out


def test_the_commands_json_holds_the_whole_report(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, [0, 1, 3])
    app = cyclopts.App(name="paceline", result_action="return_value")
    app.command(audit_command)
    assert app(["audit", str(run.path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["clean"] is False
    assert report["steps"] == 3
    assert report["epochs"][0]["missing_steps"] == [[2, 2]]
    assert report["epochs"][0]["never"] == 100
