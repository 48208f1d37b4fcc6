"""Fuzz until the time is over: ``make fuzz ARGS="--minutes 30"``.

Cases follow from a target, a seed and the run that is made first. A seed that failed is kept in ``.fuzz/failed.json``
and tried first by the next call; what it worked on stays in ``.fuzz/TARGET-SEED``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
from tests.fuzz.targets import TARGETS, CaseHangs, World, run_case
from tests.fuzz.world import make_world
from tests.processes import processes_in

_KEPT = Path(".fuzz")
_FAILED = _KEPT / "failed.json"
_SHOW_EVERY_S = 10.0
_MAX_GROWTH_MIB = 256.0


def main(arguments: Sequence[str]) -> int:
    """Fuzz; return 1 if a case failed or the server's memory grew."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz Paceline with damaged input.")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long [default: 5]")
    parser.add_argument("--target", choices=TARGETS, action="append", help="only this; may be repeated [default: all]")
    parser.add_argument(
        "--seed", type=int, default=None, help="first seed [default: from the clock]; with --once the only"
    )
    parser.add_argument("--once", action="store_true", help="run one case of each target, such as one that failed")
    options = parser.parse_args(arguments)
    targets = options.target or list(TARGETS)
    first = options.seed if options.seed is not None else int(time.time())
    end_s = time.monotonic() + 60 * options.minutes
    known = _read_failed()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-fuzz-")))
        processes = stack.enter_context(processes_in(scratch))
        world = make_world(processes, scratch)
        server = psutil.Process(world.server.popen.pid)
        memory = 0.0
        done: Counter[str] = Counter()
        failed: dict[str, list[int]] = {}
        shown_s = time.monotonic()
        for target, seed in _cases(targets, first, known):
            if time.monotonic() > end_s or (options.once and done.total() == len(targets)):
                break
            if not _try(target, seed, world, options.once):
                failed.setdefault(target, []).append(seed)
            done[target] += 1
            memory = memory or (server.memory_info().rss if done.total() > 50 * len(targets) else 0.0)
            if time.monotonic() - shown_s > _SHOW_EVERY_S:
                shown_s = time.monotonic()
                left = max(0.0, end_s - shown_s) / 60
                print(f"{done.total()} cases, {sum(map(len, failed.values()))} failed, {left:.1f} min left", flush=True)
        grown = (server.memory_info().rss - memory) / 2**20 if memory else 0.0
    print(json.dumps({"cases": done, "failed": failed, "server_grew_mib": round(grown, 1)}))
    if not options.once:
        _KEPT.mkdir(exist_ok=True)
        _FAILED.write_text(json.dumps(failed))
    return 1 if failed or grown > _MAX_GROWTH_MIB else 0


def _cases(targets: Sequence[str], first: int, known: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, int]]:
    """Yield the known failures, and then each target in turn, with rising seeds."""
    yield from ((target, seed) for target in targets for seed in known.get(target, ()))
    seed = first
    while True:
        yield from ((target, seed) for target in targets)
        seed += 1


def _try(target: str, seed: int, world: World, once: bool) -> bool:
    try:
        run_case(target, seed, world)
    except (Exception, CaseHangs):
        print(f"--- {target}, seed {seed}: python -m tests.fuzz --once --target {target} --seed {seed}", flush=True)
        traceback.print_exc()
        if not once:
            kept = _KEPT / f"{target}-{seed}"
            shutil.rmtree(kept, ignore_errors=True)
            _KEPT.mkdir(exist_ok=True)
            shutil.move(world.scratch, kept)
            world.scratch.mkdir()
            (kept / "error.txt").write_text(traceback.format_exc())
        return False
    return True


def _read_failed() -> dict[str, list[int]]:
    return json.loads(_FAILED.read_text()) if _FAILED.exists() else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
