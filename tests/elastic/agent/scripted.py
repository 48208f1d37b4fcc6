"""A fork server whose workers are scripted: they keep to the protocol of membership, and train nothing.

``python scripted.py FD``. The job's file holds the script of each worker, by its number of starts:
``{"steps": n, "world": members at the end, "faults": {"SLOT:NTH_START": [step, kind]}}``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from paceline.core import errors
from paceline.core.fork_server import run_fork_server
from paceline.elastic.worker_channel import AgentClient, Retired, WorkerChannel
from paceline.runs.directory import RunDirectory
from paceline.runs.failures import record_failure
from paceline.training import worker
from paceline.training.worker import prepare_child

LIMIT_S = 4.0
HOLDS_S = {"busy": 2.5, "grip": 60.0}
"""Seconds for which a worker computes without an answer: less than a step may take, and more."""


class Stop(Exception):
    """A signal asked this worker to save and leave."""


def on_signal(number: int, frame: object) -> None:
    raise Stop(number)


def main_under_agent(job_file: Path, channel: int, index: int, terminal: tuple[int, int]) -> int:
    """Work, and announce the exit code, as a worker does."""
    agent = AgentClient(WorkerChannel.of(channel))
    code = work(agent, job_file, index, terminal)
    agent.leave(code)
    return code


def work(agent: AgentClient, job_file: Path, index: int, terminal: tuple[int, int]) -> int:
    """Do the script's steps, in step with the others only as far as the agent asks for it."""
    script = json.loads(job_file.read_text())
    directory = job_file.parent
    starts = directory / f"starts-{index}"
    with starts.open("a") as file:
        file.write(f"{os.getpid()}\n")
    nth = len(starts.read_text().splitlines())
    has_bug = any(kind == "bug" for _, kind in script["faults"].values())
    fault_step, kind = script["faults"].get(f"{index}:{nth}", [-1, ""])
    left = -1
    print(f"worker {index} of {os.getpid()}", flush=True)
    os.write(terminal[0], f"terminal of {index}\n".encode())
    try:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, on_signal)
        if kind == "early":
            end(kind)
        progress = directory / "step"
        while True:
            assignment = agent.next_group(left, "test")
            assert assignment is not None
            left = assignment.generation
            with (directory / "groups").open("a") as file:
                file.write(json.dumps([assignment.generation, assignment.rank, assignment.world_size, index]) + "\n")
            if kind == "bug":
                end(kind)
            agent.pulse.step = int(progress.read_text()) if progress.exists() else 0
            agent.joined(left)
            while not (agent.broken(left) or agent.should_reform(left)):
                step = int(progress.read_text()) if progress.exists() else 0
                agent.pulse.step = step
                if step >= script["steps"] and assignment.world_size == script["world"]:
                    return 0
                # Who stops does so among all: then it is the same group each time.
                if kind == "loses" and step >= fault_step:
                    # It does no step without the peer, and notices before the agent that it is gone.
                    while not (directory / f"late-{left}").exists():
                        time.sleep(0.01)
                    break
                if kind and step >= fault_step and (kind != "stop" or assignment.world_size == script["world"]):
                    if kind in HOLDS_S:
                        agent.progress_tracker.begin("step")
                        agent.progress_tracker.limit_steps_to(LIMIT_S)
                        agent.beat()
                        hold_interpreter(HOLDS_S[kind])
                        kind = ""
                        continue
                    if kind == "late":
                        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it asks no more whether to stop
                        (directory / f"late-{left}").touch()
                    end(kind)
                # No step is done without a peer that ends before its first one.
                if assignment.rank == 0 and step < script["steps"] and not has_bug:
                    (directory / "step.new").write_text(str(step + 1))
                    (directory / "step.new").rename(progress)
                time.sleep(0.01)
    except Retired:
        return 0
    except Stop as asked:
        (directory / f"asked-{index}").write_text(str(asked))
        return 130 if asked.args[0] == signal.SIGINT else 75
    except Exception as error:
        agent.beat()
        return record_failure(RunDirectory(directory), index, error)


def hold_interpreter(seconds: float) -> None:
    """Compute in C code, without a chance for other threads."""
    until = time.monotonic() + seconds
    next(filter(until.__lt__, iter(time.monotonic, None)))


def end(kind: str) -> None:
    """Come to the scripted end."""
    match kind:
        case "kill" | "early":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "late":
            time.sleep(0.5)
            raise ValueError("a bug")
        case "raise" | "bug":
            raise ValueError("a bug")
        case "corrupt":
            raise errors.SilentDataCorruptionError(
                "rank 1 computed another gradient: its machine (m) is not to be trusted."
            )
        case "user":
            raise errors.ConfigError("an option is wrong")


worker.main_under_agent = main_under_agent


def preload() -> None:
    """Import no torch, which takes seconds; or take longer than any test waits, where the script says so."""
    if json.loads(Path("job.json").read_text()).get("imports_long"):
        Path("imports").touch()
        time.sleep(600)


if __name__ == "__main__":
    sys.exit(run_fork_server(int(sys.argv[1]), preload, prepare_child))
