"""What is said of a step that fails again and again."""

from __future__ import annotations

from pathlib import Path

from paceline.core.errors import PeerLostError
from paceline.data.ledger import LedgerWriter
from paceline.data.order import DeterministicSampler
from paceline.elastic.failure_policy import describe_crash_loop, of_rank
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import failure_of

ORDER = DeterministicSampler(100, 24, 4, seed=3)
MANIFEST = {"config": {"microbatches": 4, "global_batch_size": 24}, "data": {"steps_per_epoch": 5}}


def test_samples_are_those_of_the_ranks_microbatches_in_the_next_step() -> None:
    assert ORDER.steps_per_epoch == 5  # the last of 4 samples
    numbers = ORDER.indices(1, 36, 48).tolist()
    shown = ", ".join(map(str, numbers[:8]))
    assert of_rank(MANIFEST, ORDER, 6, 1, 2) == (
        f"micro-batches 2 to 3: positions 36 to 47 of the epoch (samples {shown}, ...)"
    )
    first = ORDER.microbatch_indices(0, 2, 0).tolist()
    assert of_rank(MANIFEST, ORDER, 2, 0, 4) == (
        f"micro-batch 0: positions 48 to 53 of the epoch (samples {', '.join(map(str, first))})"
    )
    # The last step's 4 samples are 2 micro-batches: the second rank of two has none.
    assert of_rank(MANIFEST, ORDER, 4, 1, 2) == ""
    assert of_rank(MANIFEST, None, 6, 1, 2) == "micro-batches 2 to 3 of the stream, after about 144 samples in all"


def test_verdict_names_step_samples_and_error(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.write_manifest(MANIFEST)
    LedgerWriter(directory.ledger, ORDER, generation=0, parent_version=None).close()

    def verdict(
        error: Exception | None, rank: int | None, steps: int = 6, how: str = "exited with status 1"
    ) -> list[str]:
        return describe_crash_loop(
            directory,
            steps=steps,
            replacements=3,
            how=how,
            failure=None if error is None else failure_of(1, error),
            rank=rank,
            ranks=2,
        ).splitlines()

    first, second, third = verdict(ValueError("a bad sample"), 1)
    assert first == (
        "The run is still at step 6 after 3 replacements, the last of which exited with status 1: "
        "another one would fail the same way."
    )
    assert second.startswith("  In step 7, rank 1 computes micro-batches 2 to 3: positions 36 to 47 of the epoch")
    assert third == "  Its last error: ValueError: a bad sample"
    assert len(verdict(PeerLostError("gone"), 1)) == 2
    assert len(verdict(None, None)) == 1
    assert "before its first step" in verdict(None, 1, steps=-1)[0]
    assert "ulimit -u" in verdict(None, 1, how="could not be started: [Errno 11] Resource temporarily unavailable")[0]
    # A spare computes nothing, and a damaged record must not hide the verdict.
    assert len(verdict(None, 2)) == 1
    directory.manifest.write_text("not toml")
    assert len(verdict(None, 1)) == 1
