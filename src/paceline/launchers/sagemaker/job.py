"""A job on SageMaker, followed through its API; what it prints is in CloudWatch."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from paceline.errors import LaunchError
from paceline.launchers.base import JobHandle, JobStatus, State
from paceline.launchers.sagemaker.aws import asked, connect
from paceline.launchers.watch import Watch

LOG_GROUP = "/aws/sagemaker/TrainingJobs"

_POLL_S = 5.0
_STREAMS = 100  # that can be read at once
_LATE_MS = 60_000  # what one machine printed may come after what others printed later
_STATES: dict[str, State] = {"Completed": "succeeded", "Failed": "failed", "Stopped": "cancelled"}
_NOT_YET = (
    "Starting",
    "Pending",
    "LaunchingMLInstances",
    "PreparingTrainingStack",
    "Downloading",
    "Restarting",
)


class SageMakerJob(JobHandle):
    """A training job.

    Args:
        reference: its name as ``id``, ``region``, and ``nodes``, the number of machines.
    """

    def __init__(self, reference: Mapping[str, Any]) -> None:
        self._reference = dict(reference)
        self._name: str = reference["id"]
        self._region: str | None = reference["region"]
        self._client: Any = None

    @property
    def reference(self) -> dict[str, Any]:
        """As it is recorded."""
        return self._reference

    def status(self) -> JobStatus:
        """What DescribeTrainingJob says."""
        job = self._ask("describe the training job", "describe_training_job")
        passed = [step["Status"] for step in job.get("SecondaryStatusTransitions", [])]
        restarts = passed.count("Restarting")
        state = _STATES.get(job["TrainingJobStatus"])
        secondary = str(job.get("SecondaryStatus", ""))
        if state == "succeeded":
            return JobStatus(state=state, exit_code=0, restarts=restarts)
        if state is not None:
            reason = str(job.get("FailureReason", secondary))
            code = re.search(r"exit ?code:? ?(\d+)", reason, flags=re.IGNORECASE)
            return JobStatus(
                state=state, detail=reason, exit_code=int(code[1]) if code else None, restarts=restarts
            )
        waits = secondary in _NOT_YET
        return JobStatus(state="pending" if waits else "running", detail=secondary, restarts=restarts)

    def logs(self, *, follow: bool = False) -> Iterator[str]:
        """What the machines print; with several, each line begins with the machine's name."""
        several = self._reference["nodes"] > 1
        seen: set[str] = set()
        since = 0
        watch = self._watch()
        while True:
            look = partial(self._look, since)
            ended, events = (watch.answer(look) or (False, [])) if follow else (True, self._events(since))
            latest: set[str] = set()
            for event in events:
                if event["eventId"] not in seen:
                    host = event["logStreamName"].rpartition("/")[2].rpartition("-")[0]
                    yield f"{host} | {event['message']}" if several and host else event["message"]
                latest.add(event["eventId"])
                since = max(since, event["timestamp"] - _LATE_MS)
            seen |= latest
            if ended:
                return
            time.sleep(_POLL_S)

    def cancel(self) -> None:
        """Stop the job: its machines get SIGTERM, and two minutes to save."""
        if not self.status().ended:
            self._ask("stop the training job", "stop_training_job")

    def wait(self) -> int:
        """Ask until it has ended."""
        status = self._watch().wait()
        if status.state != "succeeded":
            print(f"paceline: training job {self._name} {status.state}: {status.detail}.", file=sys.stderr)
        return 1 if status.exit_code is None else status.exit_code

    def _watch(self) -> Watch:
        return Watch(self.status, (_POLL_S, _POLL_S))

    def _look(self, since_ms: int) -> tuple[bool, list[Mapping[str, Any]]]:
        """Whether it has ended, and what the machines have printed by then."""
        return self.status().ended, self._events(since_ms)

    def _events(self, since_ms: int) -> list[Mapping[str, Any]]:
        """What the machines have printed, from a time on; each has a stream of its own."""
        client = connect("logs", self._region)

        def pages(operation: str, **given: Any) -> Iterator[Mapping[str, Any]]:
            pages: Iterator[Mapping[str, Any]] = iter(
                client.get_paginator(operation).paginate(logGroupName=LOG_GROUP, **given)
            )
            return pages

        def read() -> list[Mapping[str, Any]]:
            streams = [
                stream["logStreamName"]
                for page in pages("describe_log_streams", logStreamNamePrefix=f"{self._name}/")
                for stream in page["logStreams"]
            ]
            parts = [streams[at : at + _STREAMS] for at in range(0, len(streams), _STREAMS)]
            return [
                event
                for part in parts
                for page in pages("filter_log_events", logStreamNames=part, startTime=since_ms)
                for event in page["events"]
            ]

        try:
            return asked("read the log", read)
        except LaunchError as error:
            if "ResourceNotFoundException" in str(error):  # no job has printed anything yet
                return []
            raise

    def _ask(self, what: str, method: str) -> Any:
        if self._client is None:
            self._client = connect("sagemaker", self._region)
        return asked(
            f"{what} {self._name}", lambda: getattr(self._client, method)(TrainingJobName=self._name)
        )
