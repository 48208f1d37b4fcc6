"""Serving on a Ray cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
import secrets
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

import numpy as np

from paceline.core.environment import parse_endpoint
from paceline.core.errors import ConfigError, LaunchError, ServingError
from paceline.core.signals import handle_signals
from paceline.launch.ray_cluster import connect, import_ray, own_cluster
from paceline.serving.batching import SENT_AHEAD
from paceline.serving.model import Array, Arrays, ServedModel, ServingOptions, parse_replicas
from paceline.serving.replica import load_warm
from paceline.serving.replica_process import BatchFailed, ReplicaDied
from paceline.serving.replicas import Deployment, DeploymentEvents

# --- Where replicas run with ``paceline serve --on ray``, and how many of them ---


@dataclass(frozen=True, kw_only=True)
class RayServeOptions:
    """The options of ``--on ray``.

    Attributes:
        address: of a cluster that is there; None: one of the server's own, on this machine.
        least: replicas of each model.
        most: likewise; where there are more requests than the least can answer.
    """

    address: str | None = None
    least: int = 1
    most: int = 1

    @property
    def scales(self) -> bool:
        """Whether the number of replicas follows the load."""
        return self.least < self.most

    @classmethod
    def make(cls, address: str | None, replicas: str, options: ServingOptions) -> RayServeOptions:
        """The options as the command line gives them; RAY_ADDRESS names a cluster, too.

        Raises:
            ConfigError: one of them is out of range, or Ray Serve cannot keep it.
        """
        least, most = parse_replicas(replicas)
        address = address or os.environ.get("RAY_ADDRESS") or None
        if address is not None and address != "auto":
            if "://" in address:
                raise ConfigError(
                    f"--ray-address {address}: the server is a part of the cluster, so it runs on one of its "
                    "machines, and takes HOST:PORT or auto."
                )
            parse_endpoint(address, "--ray-address")
        if len(set(options.devices)) > 1 or ":" in options.devices[0]:
            raise ConfigError(
                f"--devices {','.join(options.devices)}: with --on ray it is cpu or cuda. Ray gives each "
                "replica a GPU of its own."
            )
        return cls(address=address, least=least, most=most)


# --- A replica as Ray Serve runs it: one model, one batch at a time ---


NAMESPACE = "paceline"
"""Where a server's anchor is found."""


class Anchor:
    """An actor that does nothing: Ray ends it with the server that made it."""


class RayServeReplica:
    """What Ray Serve makes an actor of.

    Its methods are coroutines that never wait: so all of them, and the constructor, run in one thread. Torch
    keeps the number of threads and "no gradients" by thread; and a batch is computed after the other.
    """

    def __init__(self, header: Mapping[str, Any], application: str, anchor: str | None) -> None:
        """Load the model that ``header`` describes, as a replica's process is told it.

        Args:
            header: what :func:`~paceline.serving.replica.load_warm` takes.
            application: of Ray Serve, that this replica belongs to.
            anchor: the name of an actor that lives as long as the server; None in a cluster of the server's
                own, which ends with it, and which nobody on another machine is to reach.
        """
        self._application = application
        self._anchor = anchor
        if anchor is None:
            _stay_on_loopback()
        self._servable = load_warm(header)

    async def predict(self, inputs: Mapping[str, Array]) -> tuple[dict[str, Array], str | None]:
        """A batch's outputs, or what the model said instead; an exception would be Ray's own."""
        try:
            # Ray shows large arrays where they lie, read-only; torch warns of such.
            writable = {name: np.require(array, None, "W") for name, array in inputs.items()}
            return self._servable.predict(writable), None
        except Exception as error:
            return {}, f"{type(error).__name__}: {error}"

    async def check_health(self) -> None:
        """Answer; Ray Serve replaces a replica that does not, be it because it computes for too long.

        Where the server is gone, however it ended, take its application out of the cluster.
        """
        if self._anchor is None:
            return
        import ray
        from ray import serve

        try:
            ray.get_actor(self._anchor, namespace=NAMESPACE)
        except ValueError:
            serve.delete(self._application, _blocking=False)


def _stay_on_loopback() -> None:
    """Ray Serve, 2.60, would have each replica listen on every interface for calls of other deployments."""
    from ray.serve._private import replica

    listen = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: listen(server, address.replace("[::]", "127.0.0.1"))


# --- One version of a model on Ray Serve: an application whose replicas the batcher feeds through a handle


log = logging.getLogger("paceline.serving")

_DEPLOYMENT = "model"
_POLL_S = 0.5
_HEALTH_PERIOD_S = 0.5
_HEALTH_FAILURES = 3  # of Ray Serve's: it replaces a replica that did not answer so often
_UPSCALE_S, _DOWNSCALE_S, _LOOK_BACK_S, _METRICS_S = 3.0, 60.0, 3.0, 0.5
_SCALED_AT = 1.25
"""Batches with each replica above which there should be more replicas. Under load the batcher keeps
SENT_AHEAD, two, with each; without any, none."""
_ERROR_LINE = re.compile(r"^(?:paceline\.core\.errors\.)?(\w+(?:\.\w+)*: .+)$")


@dataclass(frozen=True)
class RayServeCluster:
    """A Ray cluster in which Ray Serve runs.

    Attributes:
        options: where it is.
        anchor: the name of an actor that ends with this process; None where the cluster does so.
    """

    options: RayServeOptions
    anchor: str | None = None


class RayReplica:
    """Room for a replica's batches; which one computes them is Ray Serve's choice.

    Attributes:
        in_flight: batches that were sent and are not answered.
        gone: never; a replica that Ray Serve has lost is missed when the deployment looks.
    """

    gone = False

    def __init__(self, handle: Any, hang_timeout_s: float) -> None:
        self.in_flight = 0
        self._handle = handle
        self._hang_timeout_s = hang_timeout_s

    async def predict(self, inputs: Arrays) -> dict[str, Array]:
        """Compute a batch.

        Raises:
            BatchFailed: the model raised.
            ReplicaDied: the replica or its machine was lost, or took longer than a batch may take.
        """
        self.in_flight += 1
        try:
            # It may have to wait for those that were sent before it.
            outputs, failure = await asyncio.wait_for(self._ask(inputs), SENT_AHEAD * self._hang_timeout_s)
        except Exception as error:
            # The model's own errors are answers: this is Ray's.
            log.warning("a batch was not answered: %s", first_line(str(error) or type(error).__name__))
            raise ReplicaDied(computing=True) from error
        finally:
            self.in_flight -= 1
        if failure is not None:
            raise BatchFailed(failure)
        return outputs

    async def _ask(self, inputs: Arrays) -> tuple[dict[str, Array], str | None]:
        response = self._handle.predict.remote(dict(inputs))
        try:
            answer: tuple[dict[str, Array], str | None] = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        return answer


class RayDeployment(Deployment):
    """One whose replicas Ray Serve keeps alive."""

    def __init__(
        self,
        cluster: RayServeCluster,
        opened: ServedModel,
        options: ServingOptions,
        observer: DeploymentEvents,
    ) -> None:
        super().__init__(opened, options, observer)
        self._cluster = cluster
        self._ray_options = cluster.options
        self._application = f"paceline-{self.spec.name}-{self.spec.version}-{secrets.token_hex(3)}"
        self._watching: asyncio.Task[None] | None = None
        self._slots: list[RayReplica] = []

    async def start(self) -> None:
        deploying = asyncio.ensure_future(asyncio.to_thread(self._deploy))
        try:
            handle = await asyncio.shield(deploying)
            try:
                async with asyncio.timeout(self._options.startup_timeout_s):
                    while (ready := await self._ready()) < self._ray_options.least:
                        await asyncio.sleep(_POLL_S)
            except TimeoutError:
                raise ServingError(await self._why_not_ready()) from None
        except BaseException:
            with suppress(Exception):
                await deploying
            await self._delete()
            raise
        self._fill(handle, ready)
        self._watching = asyncio.create_task(self._watch(handle))

    async def close(self) -> None:
        await self.batcher.finish()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._delete()

    def _deploy(self) -> Any:
        from ray import serve

        device = self._options.devices[0]
        header = {
            "source": dataclasses.asdict(self._source),
            "spec": dataclasses.asdict(self.spec),
            "device": device,
            "threads": self._options.threads,
            "max_batch": self._options.max_batch,
        }
        deployment = serve.deployment(RayServeReplica).options(
            name=_DEPLOYMENT, ray_actor_options=self._resources(device), **self._settings()
        )
        target = serve.RunTarget(
            target=deployment.bind(header, self._application, self._cluster.anchor),
            name=self._application,
            route_prefix=None,
            logging_config=QUIET,
        )
        [handle] = serve.run_many([target], wait_for_applications_running=False)
        return handle

    def _resources(self, device: str) -> dict[str, int]:
        """What Ray reserves for a replica. In a cluster of our own there is nobody to reserve it from."""
        shared = self._ray_options.address is not None
        return {"num_cpus": self._options.threads if shared else 0, "num_gpus": int(device == "cuda")}

    def _settings(self) -> dict[str, Any]:
        ray_options = self._ray_options
        settings: dict[str, Any] = {
            # More than the batcher sends: where these lie is a choice, and should not become a refusal.
            "max_ongoing_requests": 2 * SENT_AHEAD,
            "health_check_period_s": _HEALTH_PERIOD_S,
            "health_check_timeout_s": max(self._options.hang_timeout_s / _HEALTH_FAILURES, _HEALTH_PERIOD_S),
            "graceful_shutdown_wait_loop_s": 0.1,
            "graceful_shutdown_timeout_s": self._options.hang_timeout_s,
            "max_constructor_retry_count": 1,
        }
        if not ray_options.scales:
            return {**settings, "num_replicas": ray_options.least}
        settings["autoscaling_config"] = {
            "min_replicas": ray_options.least,
            "max_replicas": ray_options.most,
            "target_ongoing_requests": _SCALED_AT,
            "upscale_delay_s": _UPSCALE_S,
            "downscale_delay_s": _DOWNSCALE_S,
            "look_back_period_s": _LOOK_BACK_S,
            "metrics_interval_s": _METRICS_S,
        }
        return settings

    async def _status(self) -> Any:
        """Of the deployment; None until there is one."""
        from ray import serve

        status = await asyncio.to_thread(serve.status)
        application = status.applications.get(self._application)
        return None if application is None else application.deployments.get(_DEPLOYMENT)

    async def _ready(self) -> int:
        status = await self._status()
        if status is None:
            return 0
        if status.status == "DEPLOY_FAILED":
            raise ServingError(f"{self.spec.name} cannot be loaded: {reason(status.message)}")
        return running(status.replica_states)

    async def _why_not_ready(self) -> str:
        status = await self._status()
        states = {} if status is None else {str(state): n for state, n in status.replica_states.items()}
        listed = ", ".join(f"{number} {state.lower()}" for state, number in states.items()) or "none"
        device = self._options.devices[0]
        needs = ", ".join(f"{name} {number}" for name, number in self._resources(device).items() if number)
        room = f"Each takes {needs}: has the cluster so much free? " if needs else ""
        return (
            f"{self.spec.name}: not {self._ray_options.least} replicas within "
            f"{self._options.startup_timeout_s:g} s, but {listed}. {room}Give them longer with "
            "--startup-timeout."
        )

    async def _watch(self, handle: Any) -> None:
        """Send as many batches as there are replicas for, however many these become."""
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                status = await self._status()
                now = 0 if status is None else running(status.replica_states)
                # Else there are fewer because there is less to do.
                unwell = status is None or status.status == "UNHEALTHY"
            except Exception as error:
                log.warning("%s: Ray Serve does not say how it is: %s", self.spec.name, first_line(str(error)))
                now, unwell = 0, True
            lost = len(self._slots) - now
            if lost > 0 and unwell:
                log.warning("%s: %d of %d replicas are lost", self.spec.name, lost, len(self._slots))
                self.restarts += lost
                for _ in range(lost):
                    self._on_restart()
            elif lost < 0:
                log.info("%s: %d replicas are ready", self.spec.name, now)
            self._fill(handle, now)

    def _fill(self, handle: Any, replicas: int) -> None:
        while len(self._slots) < replicas:
            self._slots.append(RayReplica(handle, self._options.hang_timeout_s))
            self.batcher.add(self._slots[-1])
        while len(self._slots) > replicas:
            self.batcher.remove(self._slots.pop())

    async def _delete(self) -> None:
        from ray import serve

        # With a cluster that is gone, the application is.
        with suppress(Exception):
            await asyncio.to_thread(serve.delete, self._application)


QUIET = {"log_level": "ERROR", "enable_access_log": False}
"""How Ray Serve logs; what a request asked for is nobody's business."""


def running(states: Mapping[Any, int]) -> int:
    """How many of a deployment's replicas could compute a batch now."""
    return states.get("RUNNING", 0)


def reason(message: str) -> str:
    """The error at the end of the tracebacks that Ray Serve tells."""
    for line in reversed(message.splitlines()):
        match = _ERROR_LINE.match(line.strip())
        if match is not None:
            return match[1]
    return first_line(message)


def first_line(text: str) -> str:
    """Of what Ray says, which goes on for long."""
    return text.strip().partition("\n")[0] or "it does not say why"


# --- The Ray cluster that a server's replicas run in, and Ray Serve in it ---


_EXTRA = "ray-serve"


@contextmanager
def ray_serve(options: RayServeOptions) -> Iterator[RayServeCluster]:
    """Be in a cluster in which Ray Serve runs; afterwards it is as it was before.

    No proxies of Ray Serve are started: requests come through our own server.

    Raises:
        LaunchError: Ray Serve is not installed, or the cluster cannot be used.
    """
    # What asks for the end while Ray is being started; the server's own handlers come after that.
    with handle_signals((signal.SIGTERM, signal.SIGINT), _stop), ExitStack() as stack:
        if options.address is None:
            stack.enter_context(own_cluster(_EXTRA))
            _require_serve()
            _start_serve()
            yield RayServeCluster(options)
        else:
            ray = import_ray(_EXTRA)
            _require_serve()
            connect(ray, options.address, "--ray-address")
            stack.callback(ray.shutdown)
            stack.callback(_end_serve, ray, there_before=_runs(ray))
            _start_serve()
            name = f"paceline-{secrets.token_hex(8)}"
            # Kept here: an actor without a handle ends.
            anchor = ray.remote(Anchor).options(num_cpus=0, name=name, namespace=NAMESPACE).remote()
            ray.get(anchor.__ray_ready__.remote())
            yield RayServeCluster(options, name)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _require_serve() -> None:
    try:
        from ray import serve  # noqa: F401
    except ImportError as error:
        raise LaunchError(f"Ray Serve is not installed ({error}). Run: pip install 'paceline[{_EXTRA}]'") from error
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _start_serve() -> None:
    from ray import serve

    serve.start(proxy_location="Disabled", logging_config=QUIET)


def _runs(ray: ModuleType) -> bool:
    """Whether somebody has started Ray Serve in the cluster."""
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def _end_serve(ray: ModuleType, *, there_before: bool) -> None:
    from ray import serve

    with suppress(ray.exceptions.RayError):
        if not there_before and not serve.status().applications:
            serve.shutdown()
