"""Traffic over a slow link between two hosts, under each way to communicate. Needs root and iproute2.

A host is a network namespace; the link is a pair of virtual interfaces, each of which sends no more than the
rate that is asked for. The kernel counts what they send.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

TASK = "fashion-mnist-mlp"
RATE_MBIT = 100
_ADDRESSES = ("10.78.0.1", "10.78.0.2")
_INTERFACE = "eth0"
_PORT = 29_533


@dataclass(frozen=True)
class LinkVariant:
    """A way to communicate.

    Attributes:
        name: as the report calls it.
        options: of ``paceline train``.
        bar: target of the reduction of bytes relative to the first candidate; None: no target.
    """

    name: str
    options: tuple[str, ...]
    bar: float | None = None


LEARNING_RATE = 0.05
"""Of all contenders: with it plain ddp is the most accurate of 0.01, 0.02, 0.03, 0.05, 0.1 and 0.2."""

CONTENDERS = (
    LinkVariant("ddp exact", ()),
    LinkVariant("ddp torch", ("--reduction", "ddp")),
    LinkVariant("fp16 hook", ("--comm-hook", "fp16")),
    LinkVariant("PowerSGD, rank 4", ("--comm-hook", "powersgd", "--powersgd-rank", "4"), 3.0),
    LinkVariant("local SGD, every 24", ("--local-sgd-steps", "24"), 10.0),
    # An outer momentum of 0.9 looks back ten rounds, and there are 45.
    LinkVariant(
        "DiLoCo, every 32",
        ("--local-sgd-steps", "32", "--outer-optimizer", "nesterov", "--outer-momentum", "0.5"),
        10.0,
    ),
)
MOST_WORSE = 0.005
"""How much less accurate than the first contender one may be: 0.5 points."""


@dataclass(frozen=True)
class LinkMeasurement:
    """One training over the link.

    Attributes:
        name: the contender's.
        sent_bytes: by the host that sent more, from the first connection to the end of the run.
        wire_s: what that takes at the link's rate.
        seconds: of the training itself, evaluations and all.
        accuracy: on the test split.
        steps: done.
    """

    name: str
    sent_bytes: int
    wire_s: float
    seconds: float
    accuracy: float
    steps: int


def measure(
    directory: Path,
    contenders: Sequence[LinkVariant] = CONTENDERS,
    *,
    epochs: int = 3,
    seed: int = 0,
    timeout_s: float = 1800,
) -> list[LinkMeasurement]:
    """Train with each contender in turn, one rank a host.

    Args:
        directory: for the runs; both hosts share it.
        contenders: what to compare; the first one is what the others are compared with.
        epochs: of Fashion-MNIST.
        seed: of all of them: the first weights, and the order of the samples.
        timeout_s: for one training.

    Raises:
        RuntimeError: the hosts could not be made, or a training failed; with what it printed.
    """
    with two_hosts(RATE_MBIT) as hosts:
        return [_train(directory / str(i), hosts, each, epochs, seed, timeout_s) for i, each in enumerate(contenders)]


@contextmanager
def two_hosts(rate_mbit: float) -> Iterator[tuple[str, str]]:
    """Two network namespaces, by name, joined by a link of this rate each way.

    Raises:
        RuntimeError: this process may not make them, or iproute2 is missing.
    """
    names = (f"paceline-{os.getpid()}-a", f"paceline-{os.getpid()}-b")
    with ExitStack() as stack:
        for name in names:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        first, second = names
        peer = ("peer", "name", _INTERFACE, "netns", second)
        _run("ip", "-n", first, "link", "add", _INTERFACE, "type", "veth", *peer)
        for name, address in zip(names, _ADDRESSES, strict=True):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", _INTERFACE)
            _run("ip", "-n", name, "link", "set", _INTERFACE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            limit = ("rate", f"{rate_mbit}mbit", "burst", "32kb", "latency", "1s")
            _run("tc", "-n", name, "qdisc", "add", "dev", _INTERFACE, "root", "tbf", *limit)
        yield names


def _train(
    directory: Path, hosts: tuple[str, str], contender: LinkVariant, epochs: int, seed: int, timeout_s: float
) -> LinkMeasurement:
    directory.mkdir(parents=True)
    before = [_sent_bytes(host) for host in hosts]
    command = [sys.executable, "-m", "paceline", "train", TASK, "--run-dir", str(directory / "run"), "--json"]
    command += ["--quiet", "--threads", "1", "--device", "cpu", "--interface", _INTERFACE]
    command += ["--epochs", str(epochs), "--seed", str(seed), "--set", f"lr={LEARNING_RATE}"]
    command += ["--eval-every", "never", "--checkpoint-every", "never", *contender.options]
    with ExitStack() as stack:
        ranks = []
        for rank, host in enumerate(hosts):
            environment = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            environment |= {"MASTER_ADDR": _ADDRESSES[0], "MASTER_PORT": str(_PORT)}
            output = stack.enter_context((directory / f"rank-{rank}.txt").open("w+"))
            ranks.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", host, *command],
                    env={**os.environ, **environment},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
            stack.callback(ranks[-1].kill)
        codes = [rank.wait(timeout_s) for rank in ranks]
    if any(codes):
        told = "\n".join((directory / f"rank-{rank}.txt").read_text() for rank in range(len(ranks)))
        raise RuntimeError(f"{contender.name} failed:\n{told}")
    sent = max(_sent_bytes(host) - bytes_ for host, bytes_ in zip(hosts, before, strict=True))
    result = json.loads((directory / "run" / "result.json").read_text())
    return LinkMeasurement(
        name=contender.name,
        sent_bytes=sent,
        wire_s=sent * 8 / (RATE_MBIT * 1e6),
        seconds=result["seconds"],
        accuracy=result["metrics"]["test"]["accuracy"],
        steps=result["steps"],
    )


def _sent_bytes(host: str) -> int:
    rows = json.loads(_run("ip", "-n", host, "-s", "-j", "link", "show", "dev", _INTERFACE))
    return int(rows[0]["stats64"]["tx"]["bytes"])


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError as error:
        raise RuntimeError(f"{command[0]} is missing (on Debian: apt-get install iproute2)") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
