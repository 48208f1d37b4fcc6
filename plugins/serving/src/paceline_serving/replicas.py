"""Deployments: a model's batcher and its replicas, which are kept alive."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from paceline.core.errors import ServingError
from paceline_serving.batching import Batcher
from paceline_serving.model import ServedModel, ServingOptions
from paceline_serving.replica_process import ReplicaProcess, ReplicaStarter

log = logging.getLogger("paceline_serving")

_MAX_PAUSE_S = 10.0


@dataclass(frozen=True)
class DeploymentEvents:
    """Callbacks of a deployment: the rows and seconds of each batch, and the death of a replica."""

    on_batch: Callable[[int, float], None]
    on_restart: Callable[[], None]


NO_EVENTS = DeploymentEvents(lambda rows, seconds: None, lambda: None)


class Deployment(ABC):
    """One version of a model, with the queue of its requests.

    Attributes:
        spec: for clients.
        exact_sizes: with ``--exact``, the sizes of the batches that replicas compute, the largest first.
    """

    exact_sizes: tuple[int, ...] = ()

    def __init__(self, model: ServedModel, options: ServingOptions, observer: DeploymentEvents) -> None:
        self.spec = model.spec
        self.batcher = Batcher(options, observer.on_batch)
        self._model = model
        self._options = options
        self._on_restart = observer.on_restart

    @abstractmethod
    async def start(self) -> None:
        """Return when all required replicas are ready.

        Raises:
            ServingError: a replica cannot load the model or has no resources; all replicas have ended.
        """

    @abstractmethod
    async def close(self) -> None:
        """Answer all accepted requests, then end the replicas."""

    def abandon(self) -> None:
        """Answer no more requests: :meth:`close` will not wait for them."""
        self.batcher.abandon()

    @property
    def ready_replicas(self) -> int:
        return len(self.batcher.replicas)


class LocalDeployment(Deployment):
    """A deployment whose replicas are processes of this machine, restarted when they die."""

    def __init__(
        self,
        starter: ReplicaStarter,
        model: ServedModel,
        options: ServingOptions,
        observer: DeploymentEvents = NO_EVENTS,
    ) -> None:
        super().__init__(model, options, observer)
        self._starter = starter
        self._keep_alive_tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        devices = [self._options.devices[i % len(self._options.devices)] for i in range(self._options.replicas)]
        started = await asyncio.gather(*map(self._start_replica, devices), return_exceptions=True)
        replicas = [replica for replica in started if isinstance(replica, ReplicaProcess)]
        failures = [failure for failure in started if isinstance(failure, BaseException)]
        if len({replica.exact_sizes for replica in replicas}) > 1:
            failures.append(
                ServingError(f"{self.spec.name}: --exact: the devices compute other bits. Use devices of one model.")
            )
        if failures:
            await asyncio.gather(*(replica.end() for replica in replicas))
            raise failures[0]
        self.exact_sizes = replicas[0].exact_sizes
        for replica, device in zip(replicas, devices, strict=True):
            self.batcher.add(replica)
            self._keep_alive_tasks.append(asyncio.create_task(self._keep_alive(replica, device)))

    def abandon(self) -> None:
        super().abandon()
        for task in self._keep_alive_tasks:
            task.cancel()  # before it starts another replica
        for replica in self.batcher.replicas:
            if isinstance(replica, ReplicaProcess):
                replica.kill()

    async def close(self) -> None:
        await self.batcher.finish()
        for task in self._keep_alive_tasks:
            task.cancel()
        await asyncio.gather(*self._keep_alive_tasks, return_exceptions=True)

    def _start_replica(self, device: str) -> asyncio.Future[ReplicaProcess]:
        return asyncio.ensure_future(ReplicaProcess.start(self._model, device, self._options, self._starter))

    async def _keep_alive(self, replica: ReplicaProcess | None, device: str) -> None:
        pause_s = 0.0
        try:
            while True:
                if replica is not None:
                    await replica.wait_gone()
                    self.batcher.remove(replica)
                    log.warning("%s: replica %d died; starting another", self.spec.name, replica.pid)
                    await replica.end()
                    replica = None
                    self._on_restart()
                await asyncio.sleep(pause_s)
                try:
                    replica = await self._start_replica(device)
                except (ServingError, OSError) as error:
                    pause_s = min(max(2 * pause_s, 0.5), _MAX_PAUSE_S)
                    log.error("%s; retrying in %g s", str(error).removesuffix("."), pause_s)
                else:
                    pause_s = 0.0
                    self.batcher.add(replica)
                    log.info("%s: replica %d is ready", self.spec.name, replica.pid)
        finally:
            if replica is not None:
                with suppress(ValueError):
                    self.batcher.remove(replica)
                await replica.end()
