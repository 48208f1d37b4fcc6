"""How a server batches, bounds and times what it is asked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError

UNBOUNDED = 10**7
"""Rows that may wait where it does not matter how long: ``paceline predict`` asks for them itself."""

_MOST_REPLICAS = 256
_DURATIONS = ("max_wait", "timeout", "receive_timeout", "startup_timeout", "hang_timeout", "drain_notice")


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """The options of ``paceline serve`` that its parts share.

    Attributes:
        replicas: processes for each model.
        devices: where they compute, in turns.
        max_batch: rows of a batch.
        max_wait_s: how long a batch may wait to fill while every replica computes. It never waits for an idle
            one.
        max_queue: rows that may wait while replicas are as fast as at best; fewer while they are slower. What
            comes beyond is refused with 429.
        timeout_s: how long a request may take, unless it says less itself.
        receive_timeout_s: how long a client may take to send one request.
        max_body_bytes: of a request.
        drain_notice_s: after SIGTERM, how long "not ready" is shown before connections are refused.
        startup_timeout_s: how long a replica may take to load its model.
        hang_timeout_s: a replica that computes one batch for longer is killed.
        threads: of a replica, on a CPU.
    """

    replicas: int = 1
    devices: tuple[str, ...] = ("cpu",)
    max_batch: int = 32
    max_wait_s: float = 0.002
    max_queue: int = 256
    timeout_s: float = 30.0
    receive_timeout_s: float = 10.0
    max_body_bytes: int = 64 * 2**20
    drain_notice_s: float = 1.0
    startup_timeout_s: float = 120.0
    hang_timeout_s: float = 60.0
    threads: int = 1

    def __post_init__(self) -> None:
        self._check("replicas", self.replicas, 1, _MOST_REPLICAS)
        self._check("max-batch", self.max_batch, 1, 65536)
        self._check("max-queue", self.max_queue, 1, UNBOUNDED)
        self._check("threads", self.threads, 1, 1024)
        self._check("max-body", self.max_body_bytes, 1024, 2**32)
        self._check("max-wait", self.max_wait_s, 0, 60)
        for name in ("timeout", "receive-timeout", "startup-timeout", "hang-timeout"):
            self._check(name, getattr(self, name.replace("-", "_") + "_s"), 0.001, 86400)
        self._check("drain-notice", self.drain_notice_s, 0, 600)
        for device in self.devices:
            kind, _, index = device.partition(":")
            if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or device == "cuda:":
                raise ConfigError(f"--devices are cpu, cuda or cuda:N, not {device!r}.")

    def words(self) -> tuple[str, ...]:
        """What is not the default, as the command line says it; but for replicas and devices."""
        words: list[str] = []
        for name in ("threads", "max_batch", "max_queue"):
            if getattr(self, name) != getattr(ServingOptions, name):
                words += [f"--{name.replace('_', '-')}", str(getattr(self, name))]
        for name in _DURATIONS:
            seconds = getattr(self, f"{name}_s")
            if seconds != getattr(ServingOptions, f"{name}_s"):
                words += [f"--{name.replace('_', '-')}", f"{1000 * seconds:.15g}ms"]
        if self.max_body_bytes != ServingOptions.max_body_bytes:
            words += ["--max-body", str(self.max_body_bytes // 2**20)]
        return tuple(words)

    def _check(self, name: str, value: Any, least: float, most: float) -> None:
        if not least <= value <= most:
            raise ConfigError(f"--{name} must be between {least} and {most}, but is {value}.")


def parse_replicas(text: str) -> tuple[int, int]:
    """The least and the greatest number of replicas of "2" or "1:4".

    Raises:
        ConfigError: it is neither.
    """
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text.strip())
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= least <= most <= _MOST_REPLICAS:
        raise ConfigError(
            f"--replicas must be between 1 and {_MOST_REPLICAS}, or MIN:MAX such as 1:4, but is {text}."
        )
    return least, most
