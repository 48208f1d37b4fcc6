"""The models that a server has: opened from packages, and exchanged while requests come."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from paceline.errors import ConfigError
from paceline.packages.package import open_package
from paceline.packages.trust import require_trusted
from paceline.serving.deployment import Deployment, LocalDeployment, Observer
from paceline.serving.metrics import Metrics
from paceline.serving.options import ServingOptions
from paceline.serving.servable import ModelSpec, Opened, Source
from paceline.serving.starting import Starter

log = logging.getLogger("paceline.serving")

DeploymentFactory = Callable[[Opened, ServingOptions, Observer], Deployment]

_VERSION_DIGITS = 12  # of a package's digest


def open_model(place: str, *, program: Literal["auto", "pt2", "onnx"] = "auto", task: str = "") -> Opened:
    """Verify a package and choose how it is computed.

    Args:
        place: its directory or reference.
        program: which of its programs; auto is the pt2, or else the ONNX one.
        task: use the weights with this task's code instead.

    Raises:
        PackageError: it does not verify, has no such program, or its pt2 is not trusted.
        ConfigError: it cannot be served.
    """
    package = open_package(place)
    manifest = package.manifest
    kind: Literal["pt2", "onnx", "task"]
    if task:
        kind = "task"
    elif program != "auto":
        kind = program
    else:
        kind = "onnx" if "onnx" in manifest.programs and "pt2" not in manifest.programs else "pt2"
    if kind != "task" and kind not in manifest.programs:
        there = ", ".join(manifest.programs) or "none"
        raise ConfigError(
            f"{place} has no {kind} program; it has: {there}. "
            "Say --task TASK to use its weights with the task's code."
        )
    if kind == "pt2":
        require_trusted(package.digest, manifest, package.path)
    spec = ModelSpec(
        name=manifest.name,
        version=package.digest[:_VERSION_DIGITS],
        inputs=manifest.inputs,
        outputs=manifest.outputs,
        labels=manifest.labels,
        probabilities=manifest.probabilities,
        label=manifest.label,
        platform="onnxruntime_onnx" if kind == "onnx" else "pytorch",
    )
    path = str(package.path.absolute())
    return Opened(Source(package=path, digest=package.digest, kind=kind, task=task), spec)


class Models:
    """By name; what serves a name can be exchanged."""

    def __init__(self, options: ServingOptions, deploy: DeploymentFactory | None = None) -> None:
        """``deploy`` makes a deployment; None: its replicas are processes of this machine."""
        self._options = options
        self._starter = Starter(options.threads)
        self._make_deployment = deploy or partial(LocalDeployment, self._starter)
        self._deployments: dict[str, Deployment] = {}
        self._opened: dict[str, Opened] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._swapping = asyncio.Lock()
        self.metrics = Metrics(lambda: self._deployments)

    @property
    def deployments(self) -> Mapping[str, Deployment]:
        """Those that take requests."""
        return self._deployments

    @property
    def ready(self) -> bool:
        """Whether every model has a replica that could compute now."""
        return all(deployment.ready_replicas for deployment in self._deployments.values())

    async def start(self, opened: Sequence[Opened]) -> None:
        """Load all of them; where one fails, none is left.

        Raises:
            ConfigError: two have the same name.
            ServingError: one cannot be loaded.
        """
        names = [model.spec.name for model in opened]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ConfigError(f"two packages are called {min(twice)}; addresses need different names.")
        try:
            for model in opened:
                self._deployments[model.spec.name] = await self._deploy(model)
                self._opened[model.spec.name] = model
        except BaseException:
            await self.close()
            raise

    async def swap(self, name: str, place: str) -> ModelSpec:
        """Serve ``name`` from another package from now on.

        Requests that were taken before are answered by the old one, which then ends. Where the new one cannot
        be loaded, the old one stays.

        Raises:
            PackageError, ConfigError, ServingError: the new one cannot be served.
        """
        async with self._swapping:
            before = self._opened[name]
            program: Literal["auto", "onnx"] = "onnx" if before.source.kind == "onnx" else "auto"
            model = await asyncio.to_thread(open_model, place, program=program, task=before.source.task)
            model = replace(model, spec=replace(model.spec, name=name))
            deployment = await self._deploy(model)
            old = self._deployments[name]
            self._deployments[name] = deployment
            self._opened[name] = model
        self.metrics.swapped(name)
        log.info("%s: %s is served instead of %s", name, model.spec.version, old.spec.version)
        task = asyncio.create_task(old.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return model.spec

    async def close(self) -> None:
        """Answer what was asked, then end all replicas."""
        await asyncio.gather(*(d.close() for d in self._deployments.values()), *self._closing)
        await self._starter.close()

    async def _deploy(self, model: Opened) -> Deployment:
        observer = self.metrics.observer(model.spec.name)
        deployment = self._make_deployment(model, self._options, observer)
        await deployment.start()
        return deployment
