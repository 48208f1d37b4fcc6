"""A model that is served: the batcher that feeds its replicas, and who keeps these alive."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from paceline.core.errors import ServingError
from paceline.serving.batching import Batcher
from paceline.serving.model import Array, Arrays, ServedModel, ServingOptions
from paceline.serving.replica_process import ReplicaProcess, ReplicaStarter

log = logging.getLogger("paceline.serving")

_LONGEST_PAUSE_S = 10.0


@dataclass(frozen=True)
class DeploymentEvents:
    """Who is told of a deployment: the rows and seconds of each batch, and that a replica died."""

    on_batch: Callable[[int, float], None]
    on_restart: Callable[[], None]


NOBODY = DeploymentEvents(lambda rows, seconds: None, lambda: None)


class Deployment(ABC):
    """One version of a model, and where its requests wait for replicas.

    Attributes:
        spec: what clients are told of it.
        batcher: where its requests wait.
        restarts: replicas that died and were started again.
    """

    def __init__(self, opened: ServedModel, options: ServingOptions, observer: DeploymentEvents) -> None:
        self.spec = opened.spec
        self.batcher = Batcher(options, observer.on_batch)
        self.restarts = 0
        self._source = opened.source
        self._options = options
        self._on_restart = observer.on_restart

    @abstractmethod
    async def start(self) -> None:
        """Return when all replicas that there must be are ready.

        Raises:
            ServingError: one could not load the model, or there is no room for it; nothing of it is left.
        """

    @abstractmethod
    async def close(self) -> None:
        """Answer what was asked, then end the replicas."""

    @property
    def ready_replicas(self) -> int:
        """How many could compute a batch now."""
        return len(self.batcher.replicas)

    def submit(self, inputs: Arrays) -> asyncio.Future[dict[str, Array]]:
        """Ask for a prediction; see :meth:`Batcher.submit`."""
        return self.batcher.submit(inputs)


class LocalDeployment(Deployment):
    """One whose replicas are processes of this machine, kept alive."""

    def __init__(
        self,
        starter: ReplicaStarter,
        opened: ServedModel,
        options: ServingOptions,
        observer: DeploymentEvents = NOBODY,
    ) -> None:
        super().__init__(opened, options, observer)
        self._starter = starter
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        devices = [self._options.devices[i % len(self._options.devices)] for i in range(self._options.replicas)]
        started = await asyncio.gather(*map(self._start_replica, devices), return_exceptions=True)
        replicas = [replica for replica in started if isinstance(replica, ReplicaProcess)]
        failures = [failure for failure in started if isinstance(failure, BaseException)]
        if failures:
            await asyncio.gather(*(replica.end() for replica in replicas))
            raise failures[0]
        for replica, device in zip(replicas, devices, strict=True):
            self.batcher.add(replica)
            self._keepers.append(asyncio.create_task(self._keep(replica, device)))

    async def close(self) -> None:
        await self.batcher.finish()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    def _start_replica(self, device: str) -> asyncio.Future[ReplicaProcess]:
        return asyncio.ensure_future(
            ReplicaProcess.start(self._source, self.spec, device, self._options, self._starter)
        )

    async def _keep(self, replica: ReplicaProcess | None, device: str) -> None:
        """Whenever the replica dies, start another."""
        pause_s = 0.0
        try:
            while True:
                if replica is not None:
                    await replica.wait_gone()
                    self.batcher.remove(replica)
                    log.warning("%s: replica %d died; another is started", self.spec.name, replica.pid)
                    await replica.end()
                    replica = None
                    self.restarts += 1
                    self._on_restart()
                await asyncio.sleep(pause_s)
                try:
                    replica = await self._start_replica(device)
                except (ServingError, OSError) as error:
                    pause_s = min(max(2 * pause_s, 0.5), _LONGEST_PAUSE_S)
                    log.error("%s; the next try is in %g s", error, pause_s)
                else:
                    pause_s = 0.0
                    self.batcher.add(replica)
                    log.info("%s: replica %d is ready", self.spec.name, replica.pid)
        finally:
            if replica is not None:
                with suppress(ValueError):
                    self.batcher.remove(replica)
                await replica.end()
