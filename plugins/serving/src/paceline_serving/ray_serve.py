"""Serving with replicas on a Ray cluster."""

from __future__ import annotations

import asyncio
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
from paceline.core.plugins import import_library
from paceline.core.signals import handle_signals
from paceline_ray.cluster import connect, import_ray, own_cluster
from paceline_serving.batching import MAX_IN_FLIGHT, Deployment, DeploymentEvents
from paceline_serving.model import Array, Arrays, ServedModel, ServingOptions, parse_replicas
from paceline_serving.replica import describe_failure, end_if_gpu_is_lost, load_warm
from paceline_serving.replica_process import BatchFailed, ReplicaDied, load_header

# --- Options of ``paceline serve --on ray`` ---


@dataclass(frozen=True, kw_only=True)
class RayServeOptions:
    """The options of ``--on ray``.

    Attributes:
        address: of an existing cluster; None: a cluster of the server's own, on this machine.
        least: smallest number of replicas of each model.
        most: largest number of replicas, used under load.
    """

    address: str | None = None
    least: int = 1
    most: int = 1

    @classmethod
    def make(cls, address: str | None, replicas: str, options: ServingOptions) -> RayServeOptions:
        """Parse the options of the command line; RAY_ADDRESS can also name a cluster."""
        least, most = parse_replicas(replicas)
        address = address or os.environ.get("RAY_ADDRESS") or None
        if address is not None and address != "auto":
            if "://" in address:
                raise ConfigError(
                    f"--ray-address {address}: the server is a part of the cluster, so it must run on one of its "
                    "nodes, with --ray-address HOST:PORT or auto."
                )
            parse_endpoint(address, "--ray-address")
        if options.exact:
            raise ConfigError("--exact is not supported by --on ray: its nodes may compute other bits.")
        if len(set(options.devices)) > 1 or ":" in options.devices[0]:
            raise ConfigError(
                f"--devices {','.join(options.devices)}: must be cpu or cuda with --on ray, which gives each "
                "replica a GPU of its own."
            )
        return cls(address=address, least=least, most=most)


# --- A replica as an actor of Ray Serve: one model, one batch at a time ---


NAMESPACE = "paceline"
"""Ray namespace of the servers' anchors."""


class Anchor:
    """An idle actor, which Ray ends together with the server that created it."""


class RayServeReplica:
    """The class of Ray Serve's actors.

    Its methods are coroutines that never wait, so they all run in one thread, like the constructor: torch keeps
    the number of threads and the gradient mode per thread, and batches must be computed one after another.
    """

    def __init__(self, header: Mapping[str, Any], application: str, anchor: str | None) -> None:
        """Load the model that ``header`` describes.

        Args:
            application: Ray Serve application of this replica.
            anchor: name of an actor that lives as long as the server; None in a cluster of the server's own,
                which ends with it and must not be reachable from other machines.
        """
        self._application = application
        self._anchor = anchor
        if anchor is None:
            _listen_on_loopback_only()
        self._servable = load_warm(header)

    async def predict(self, inputs: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Any] | None]:
        """Return a batch's outputs, or the model's error described, since an exception would be taken for Ray's."""
        try:
            # Ray maps large arrays read-only, and torch warns about such arrays.
            writable = {name: np.require(array, None, "W") for name, array in inputs.items()}
            return self._servable.predict(writable), None
        except Exception as error:
            end_if_gpu_is_lost()
            return {}, describe_failure(error)

    async def check_health(self) -> None:
        """Answer; Ray Serve replaces a replica that does not, for example because it computes for too long.

        If the server has ended in any way, remove its application from the cluster.
        """
        if self._anchor is None:
            return
        import ray
        from ray import serve

        try:
            ray.get_actor(self._anchor, namespace=NAMESPACE)
        except ValueError:
            serve.delete(self._application, _blocking=False)


def _listen_on_loopback_only() -> None:
    """Keep Ray Serve 2.60 from listening on every interface for calls of other deployments."""
    from ray.serve._private import replica

    listen = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: listen(server, address.replace("[::]", "127.0.0.1"))


# --- One version of a model: a Ray Serve application whose replicas the batcher feeds through a handle


log = logging.getLogger("paceline_serving")

_DEPLOYMENT = "model"
_POLL_S = 0.5
_HEALTH_PERIOD_S = 0.5
_HEALTH_FAILURES = 3  # Ray Serve replaces a replica after this many missing answers
_UPSCALE_S, _DOWNSCALE_S, _LOOK_BACK_S, _METRICS_S = 3.0, 60.0, 3.0, 0.5
_TARGET_IN_FLIGHT = 1.25
"""Batches per replica above which Ray Serve adds replicas. Under load the batcher keeps MAX_IN_FLIGHT, two, in
flight with each replica; without load, none."""
_ERROR_LINE = re.compile(r"^(?:paceline\.core\.errors\.)?(\w+(?:\.\w+)*: .+)$")


class RayReplica:
    """A place for a replica's batches; Ray Serve chooses the replica that computes them."""

    gone = False  # the deployment notices replicas that Ray Serve has lost

    def __init__(self, handle: Any, hang_timeout_s: float) -> None:
        self.in_flight = 0
        self._handle = handle
        self._hang_timeout_s = hang_timeout_s

    async def predict(self, inputs: Arrays) -> dict[str, Array]:
        self.in_flight += 1
        response = self._handle.predict.remote(dict(inputs))
        try:
            # The batch may have to wait for those that were sent before it.
            async with asyncio.timeout(MAX_IN_FLIGHT * self._hang_timeout_s):
                outputs, failure = await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except Exception as error:
            response.cancel()
            # The model's own errors are answers, so this error is Ray's.
            log.warning("a batch was not answered: %s", first_line(str(error) or type(error).__name__))
            raise ReplicaDied(computing=True) from error
        finally:
            self.in_flight -= 1
        if failure is not None:
            raise BatchFailed(failure["error"], is_invalid=failure["is_invalid"])
        answer: dict[str, Array] = outputs
        return answer


class RayDeployment(Deployment):
    """A deployment whose replicas Ray Serve keeps alive."""

    def __init__(
        self,
        ray_options: RayServeOptions,
        anchor: str | None,
        model: ServedModel,
        options: ServingOptions,
        observer: DeploymentEvents,
    ) -> None:
        super().__init__(model, options, observer)
        self._ray_options = ray_options
        self._anchor = anchor
        self._application = f"paceline-{self.spec.name}-{self.spec.version}-{secrets.token_hex(3)}"
        self._watch_task: asyncio.Task[None] | None = None
        self._slots: list[RayReplica] = []

    async def start(self) -> None:
        deploy_task = asyncio.ensure_future(asyncio.to_thread(self._deploy))
        try:
            handle = await asyncio.shield(deploy_task)
            try:
                async with asyncio.timeout(self._options.startup_timeout_s):
                    while (ready := await self._ready()) < self._ray_options.least:
                        await asyncio.sleep(_POLL_S)
            except TimeoutError:
                raise ServingError(await self._describe_missing_replicas()) from None
        except BaseException:
            with suppress(Exception):
                await deploy_task
            await self._delete()
            raise
        self._fill(handle, ready)
        self._watch_task = asyncio.create_task(self._watch(handle))

    async def close(self) -> None:
        await self.batcher.finish()
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.gather(self._watch_task, return_exceptions=True)
        await self._delete()

    def _deploy(self) -> Any:
        from ray import serve

        device = self._options.devices[0]
        header = load_header(self._model, device, self._options)
        deployment = serve.deployment(RayServeReplica).options(
            name=_DEPLOYMENT, ray_actor_options=self._resources(device), **self._settings()
        )
        target = serve.RunTarget(
            target=deployment.bind(header, self._application, self._anchor),
            name=self._application,
            route_prefix=None,
            logging_config=QUIET,
        )
        [handle] = serve.run_many([target], wait_for_applications_running=False)
        return handle

    def _resources(self, device: str) -> dict[str, int]:
        """Return what Ray reserves for a replica: nothing in a cluster of our own, which has no other users."""
        is_shared = self._ray_options.address is not None
        return {"num_cpus": self._options.threads if is_shared else 0, "num_gpus": int(device == "cuda")}

    def _settings(self) -> dict[str, Any]:
        ray_options = self._ray_options
        settings: dict[str, Any] = {
            # More than the batcher sends, so that Ray Serve's distribution of batches never refuses one.
            "max_ongoing_requests": 2 * MAX_IN_FLIGHT,
            "health_check_period_s": _HEALTH_PERIOD_S,
            "health_check_timeout_s": max(self._options.hang_timeout_s / _HEALTH_FAILURES, _HEALTH_PERIOD_S),
            "graceful_shutdown_wait_loop_s": 0.1,
            "graceful_shutdown_timeout_s": self._options.hang_timeout_s,
            "max_constructor_retry_count": 1,
        }
        if ray_options.least == ray_options.most:
            return {**settings, "num_replicas": ray_options.least}
        settings["autoscaling_config"] = {
            "min_replicas": ray_options.least,
            "max_replicas": ray_options.most,
            "target_ongoing_requests": _TARGET_IN_FLIGHT,
            "upscale_delay_s": _UPSCALE_S,
            "downscale_delay_s": _DOWNSCALE_S,
            "look_back_period_s": _LOOK_BACK_S,
            "metrics_interval_s": _METRICS_S,
        }
        return settings

    async def _status(self) -> Any:
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
        return int(status.replica_states.get("RUNNING", 0))

    async def _describe_missing_replicas(self) -> str:
        status = await self._status()
        states = {} if status is None else {str(state): n for state, n in status.replica_states.items()}
        states_text = ", ".join(f"{number} {state.lower()}" for state, number in states.items()) or "none"
        device = self._options.devices[0]
        needs = ", ".join(f"{name} {number}" for name, number in self._resources(device).items() if number)
        question = f"Each needs {needs}: check that the cluster has that much free. " if needs else ""
        return (
            f"{self.spec.name}: fewer than {self._ray_options.least} replicas were ready within "
            f"{self._options.startup_timeout_s:g} s; their states: {states_text}. {question}Increase the limit with "
            "--startup-timeout."
        )

    async def _watch(self, handle: Any) -> None:
        """Adapt the number of places for batches to the number of replicas."""
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                status = await self._status()
                num_running = 0 if status is None else status.replica_states.get("RUNNING", 0)
                # Otherwise Ray Serve has removed replicas because the load is low.
                is_unhealthy = status is None or status.status == "UNHEALTHY"
            except Exception as error:
                log.warning("%s: Ray Serve reports no status: %s", self.spec.name, first_line(str(error)))
                num_running, is_unhealthy = 0, True
            lost = len(self._slots) - num_running
            if lost > 0 and is_unhealthy:
                log.warning("%s: %d of %d replicas were lost", self.spec.name, lost, len(self._slots))
                for _ in range(lost):
                    self._on_restart()
            elif lost < 0:
                log.info("%s: %d replicas are ready", self.spec.name, num_running)
            self._fill(handle, num_running)

    def _fill(self, handle: Any, replicas: int) -> None:
        while len(self._slots) < replicas:
            self._slots.append(RayReplica(handle, self._options.hang_timeout_s))
            self.batcher.add(self._slots[-1])
        while len(self._slots) > replicas:
            self.batcher.remove(self._slots.pop())

    async def _delete(self) -> None:
        from ray import serve

        # If the cluster is gone, so is the application.
        with suppress(Exception):
            await asyncio.to_thread(serve.delete, self._application)


QUIET = {"log_level": "ERROR", "enable_access_log": False}
"""Logging of Ray Serve, without the contents of requests."""


def reason(message: str) -> str:
    """Return the error at the end of Ray Serve's tracebacks."""
    for line in reversed(message.splitlines()):
        match = _ERROR_LINE.match(line.strip())
        if match is not None:
            return match[1]
    return first_line(message)


def first_line(text: str) -> str:
    """Return the first line of one of Ray's long messages."""
    return text.strip().partition("\n")[0] or "no reason given"


# --- The Ray cluster of a server's replicas, and Ray Serve in it ---


_EXTRA = "ray-serve"


@contextmanager
def ray_serve(options: RayServeOptions) -> Iterator[str | None]:
    """Connect to a cluster in which Ray Serve runs, and leave it as it was before.

    Starts no proxies of Ray Serve, since requests come through our own server.

    Yields:
        The name of an actor that ends with this process; None if the cluster itself ends with it.

    Raises:
        LaunchError: Ray Serve is not installed, or the cluster cannot be used.
    """
    # Handle stop signals while Ray is starting; the server installs its own handlers later.
    with handle_signals((signal.SIGTERM, signal.SIGINT), _stop), ExitStack() as stack:
        if options.address is None:
            stack.enter_context(own_cluster(_EXTRA))
            _require_serve()
            _start_serve()
            yield None
        else:
            ray = import_ray(_EXTRA)
            _require_serve()
            connect(ray, options.address, "--ray-address")
            stack.callback(ray.shutdown)
            stack.callback(_end_serve, ray, was_running=_is_serve_running(ray))
            _start_serve()
            name = f"paceline-{secrets.token_hex(8)}"
            # Keep the handle: an actor without a handle ends.
            anchor = ray.remote(Anchor).options(num_cpus=0, name=name, namespace=NAMESPACE).remote()
            ray.get(anchor.__ray_ready__.remote())
            yield name


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _require_serve() -> None:
    import_library("ray.serve", "--on ray", _EXTRA, LaunchError)
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _start_serve() -> None:
    from ray import serve

    serve.start(proxy_location="Disabled", logging_config=QUIET)


def _is_serve_running(ray: ModuleType) -> bool:
    """Return whether Ray Serve is already running in the cluster."""
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def _end_serve(ray: ModuleType, *, was_running: bool) -> None:
    from ray import serve

    with suppress(ray.exceptions.RayError):
        if not was_running and not serve.status().applications:
            serve.shutdown()
