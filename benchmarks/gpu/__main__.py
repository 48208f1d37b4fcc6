"""``python -m benchmarks.gpu test`` and ``bench``: Paceline proven and measured on a GPU.

Needs a Python that has its torch, and installs nothing: missing packages come from a folder.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu.rows import Machine, Outcome, Row

ROOT = Path(__file__).parents[2]
SOURCES = [*map(str, (ROOT, ROOT / "src", *sorted(ROOT.glob("plugins/*/src"))))]
_PROBE_S = 90
_PATIENCE = 6.0  # with a CPU that pretends to be a GPU


def main(argv: Sequence[str]) -> int:
    """Run rows or write documents; return 0 if all is well, 1 if a row is not, 2 if there is nothing to run on."""
    arguments = _parse(argv)
    if arguments.command == "docs":
        return _write_docs(arguments.results)
    out = arguments.out.resolve()
    work = out / f"{arguments.command}-work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    path = [*unpack_site(arguments.site, work), *SOURCES]
    sys.path[:0] = path
    # A fixed seed of hashes: a process that trains without one would start itself once more.
    variables = {"PYTHONPATH": os.pathsep.join(path), "PYTHONHASHSEED": "0"}
    if arguments.stand_in:
        variables |= _pretend(work, variables["PYTHONPATH"])
    try:
        found = _probe(variables)
        if found["problem"] is not None:
            print(f"{sys.executable} cannot use a GPU: {found['problem']}. Nothing was run.", file=sys.stderr)
            return 2
        return _run(arguments, found, work, variables)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what, minutes in (("test", "prove that it works", 5.0), ("bench", "measure how fast it is", 4.0)):
        command = commands.add_parser(name, help=what)
        command.add_argument(
            "--out",
            type=Path,
            default=ROOT / "runs" / "gpu",
            help=f"folder for {name}.md, .json and .log; default: runs/gpu",
        )
        command.add_argument("--site", type=Path, help="folder of wheels or packages that this Python lacks")
        command.add_argument("--minutes", type=float, default=minutes, help="after them no row begins")
        command.add_argument(
            "--jobs", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 4)), help="rows at a time"
        )
        command.add_argument(
            "--only", nargs="+", default=[], metavar="ROW", help="rows whose names contain one of these"
        )
        command.add_argument("--stand-in", action="store_true", help="let the CPU pretend to be a GPU")
        command.add_argument("--write-docs", action="store_true", help="also write the results into the documents")
    docs = commands.add_parser("docs", help="write results into docs/gpu-results.md and the README")
    docs.add_argument("results", nargs="+", type=Path, help="the JSON files of test and bench")
    return parser.parse_args(argv)


def unpack_site(folder: Path | None, work: Path) -> list[str]:
    """Return the folder with the packages that were given; wheels are unpacked, without any package index."""
    if folder is None:
        return []
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        return [str(folder.resolve())]
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(work / "site")
    return [str(work / "site")]


def _pretend(work: Path, path: str) -> dict[str, str]:
    """Return the variables of processes for which the CPU pretends to be a GPU."""
    folder = work / "stand-in"
    folder.mkdir()
    fixture = importlib.import_module("tests.gpu_stand_in.fixture")
    variables: dict[str, str] = fixture.stand_in_variables(folder, gpus=1)
    return {**variables, "PYTHONPATH": os.pathsep.join([variables["PYTHONPATH"], path]), "OMP_NUM_THREADS": "1"}


def _probe(variables: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu.machine"]
    try:
        ended = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=_PROBE_S, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        return {"problem": f"torch did not answer within {_PROBE_S} s"}
    if ended.returncode:
        return {"problem": (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]}
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _run(arguments: argparse.Namespace, found: dict[str, Any], work: Path, variables: dict[str, str]) -> int:
    from benchmarks.gpu.rows import Machine, line_of, run_rows, summary_of

    machine = Machine(found["gpus"], found["real"], found["facts"])
    patience = 1.0 if machine.real else _PATIENCE
    rows = _rows(arguments, machine)
    print(f"{machine.title}; {', '.join(f'{name} {value}' for name, value in machine.facts.items())}", flush=True)
    outcomes: list[Outcome] = []
    results = work.parent / arguments.command
    results.with_suffix(".log").write_bytes(b"")

    def on_outcome(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(line_of(outcome), flush=True)
        _write(results, machine, outcomes, work / outcome.name / "log.txt")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    os.chdir(ROOT)
    try:
        run_rows(
            rows,
            machine,
            work,
            jobs=arguments.jobs,
            seconds=60 * arguments.minutes * patience,
            patience=patience,
            variables=variables,
            on_outcome=on_outcome,
        )
    except KeyboardInterrupt:
        print("interrupted: the other rows were not run")
    good = len(outcomes) == len(rows) and all(outcome.is_good for outcome in outcomes)
    print(f"{summary_of(outcomes)}. {results}.md")
    if arguments.write_docs:
        return max(_write_docs([results.with_suffix(".json")]), int(not good))
    return int(not good)


def _rows(arguments: argparse.Namespace, machine: Machine) -> list[Row]:
    if arguments.command == "test":
        from benchmarks.gpu.checks import rows

        found = rows()
    else:
        from benchmarks.gpu.speed import rows as rows_of_bench

        found = rows_of_bench(len(machine.gpus))
    return [row for row in found if not arguments.only or any(word in row.name for word in arguments.only)]


def _write(results: Path, machine: Machine, outcomes: list[Outcome], log: Path) -> None:
    """Write what is known so far: the machine may be taken back at any moment."""
    from benchmarks.gpu.rows import as_json, as_markdown

    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    title = f"make {results.name}-gpu"
    section = f"## {machine.title}: `{title}`\n\n{as_markdown(machine, outcomes, date)}\n"
    results.with_suffix(".json").write_text(as_json(title, machine, outcomes, date))
    results.with_suffix(".md").write_text(section)
    if log.exists():
        with results.with_suffix(".log").open("ab") as logs:
            logs.write(f"--- {outcomes[-1].name}: {outcomes[-1].status}\n".encode() + log.read_bytes())


def _write_docs(results: Sequence[Path]) -> int:
    sys.path[:0] = SOURCES
    from benchmarks.gpu.pages import write
    from benchmarks.gpu.rows import from_json

    for path in results:
        try:
            write(*from_json(path.read_text()))
        except ValueError as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
