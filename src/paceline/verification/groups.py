"""Groups of processes that do several trainings, one after the other. No torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.launchers.local.base import LocalSpec, get_local_launcher
from paceline.verification.plan import Plan, Training, done_path, is_done, lints_path
from paceline.verification.request import Request

_LOOK_S = 0.2
TAIL_LINES = 15
"""How much of what a process printed is told of it when it fails."""

Tell = Callable[[str], None]


class Groups:
    """Starts the groups of one verification.

    Args:
        request: what is verified.
        root: its directory.
        tell: called with a line of progress from time to time.
    """

    def __init__(self, request: Request, root: Path, tell: Tell) -> None:
        self._request, self._root, self._tell = request, root, tell
        self._groups = 0

    def train(self, trainings: Sequence[Training], *, lint: bool = False) -> None:
        """Train on one number of processes; a run that brings them down does not keep back those after it.

        Args:
            trainings: all on as many processes.
            lint: also look at the task's arithmetic.

        Raises:
            LaunchError: the processes could not be started.
            KeyboardInterrupt: somebody asked for a stop; all processes are ended.
        """
        left = list(trainings)
        while left:
            self._run_group(left, lint=lint)
            done = [training for training in left if is_done(self._root, training)]
            left = left[len(done) :]
            if not done and (not lint or lints_path(self._root).exists()):
                left = left[1:]  # it ended the processes, and nobody could say why
            lint = False

    def _run_group(self, trainings: Sequence[Training], *, lint: bool) -> None:
        request = self._request
        plan = Plan(
            task=request.task,
            set=tuple(request.options.get("set", ())),
            root=str(self._root),
            least_shards=max(request.worlds),
            trainings=tuple(trainings),
            lint=lint,
        )
        self._groups += 1
        path = self._root / f"plan-{self._groups}.json"
        plan.write(path)
        world_size = trainings[0].world_size
        launcher = get_local_launcher("spawn")
        rendered = launcher.render(
            LocalSpec(
                command=("-m", "paceline.verification.worker", str(path)),
                nproc=world_size,
                threads=trainings[0].options["threads"],
            )
        )
        logs = [self._root / f"group-{self._groups}-rank-{r}.log" for r in range(world_size)]
        rendered = replace(
            rendered,
            processes=tuple(
                replace(process, log=log) for process, log in zip(rendered.processes, logs, strict=True)
            ),
        )
        on = f"{world_size} process{'' if world_size == 1 else 'es'}"
        self._tell(f"{on}: {', '.join(training.name for training in trainings)}")
        job = launcher.submit(rendered)
        with _Progress(self._root, trainings, self._tell):
            code = job.wait()
        if code in (75, 130):
            raise KeyboardInterrupt
        if code:
            self._tell(f"{on} ended with exit code {code}.{_tail(logs)}")


class _Progress:
    """Tells of each training that a group is through with."""

    def __init__(self, root: Path, trainings: Sequence[Training], tell: Tell) -> None:
        self._root, self._left, self._tell = root, list(trainings), tell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paceline-verify-progress", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            over = self._over.wait(_LOOK_S)
            while self._left and done_path(self._root, self._left[0], 0).exists():
                self._tell(f"  {self._left.pop(0).name} is through")
            if over:
                return


def _tail(logs: Sequence[Path]) -> str:
    """The end of what the first process printed that printed anything."""
    for log in logs:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        if lines:
            return "".join(f"\n  {line}" for line in lines[-TAIL_LINES:])
    return ""
