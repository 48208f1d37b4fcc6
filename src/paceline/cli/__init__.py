"""The ``paceline`` command: one file a command, imported when it is used."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from typing import TextIO

from cyclopts import App, CoercionError, CycloptsError, UnknownOptionError, UnusedCliTokensError

from paceline import __version__
from paceline.errors import ConfigError, PacelineError

app = App(
    name="paceline",
    help="Exact, reproducible distributed training on PyTorch.",
    version=__version__,
    result_action="return_value",
    help_format="plaintext",  # Markdown's renderer takes longer to import than all of ours
)
_COMMANDS = {
    "train": ("train:train", "Train a task, on one process or several."),
    "resume": ("train:resume", "Continue a run at its exact next sample."),
    "tune": ("tune:tune", "Search for a task's best hyperparameters, many trials at once."),
    "launch": ("launch:launch", "Start any program on one process or many machines."),
    "jobs": ("jobs:jobs", "List the jobs that were submitted."),
    "status": ("jobs:status", "Say where a job stands."),
    "cancel": ("jobs:cancel", "End a job."),
    "doctor": ("doctor:doctor", "Look at a job's machines, and what is between them, before the job."),
    "runs": ("runs:app", "List runs, with state and results; show what happened in one."),
    "dashboard": ("dashboard:dashboard", "Show runs and jobs live on a local page."),
    "logs": ("logs:logs", "Show what each rank of a run printed."),
    "join": ("join:join", "Join a run that other machines are at."),
    "scale": ("scale:scale", "Change the number of processes of a run at work."),
    "audit": ("audit:audit", "Prove from a run's ledger that every sample was seen exactly once."),
    "chaos": ("chaos:chaos", "Train under faults, and prove that nothing is lost."),
    "report": ("report:report", "Analyse what came out of runs, and compare them."),
    "check": ("check:check", "Say whether the recorded numbers of a run or a package still hold."),
    "checkpoint": ("checkpoint:app", "List, verify and remove a run's checkpoints."),
    "gc": ("gc:gc", "Remove runs, checkpoints and packages that a policy does not keep."),
    "verify": ("verify:verify", "Train under every strategy, and compare with one process."),
    "scan": ("scan:scan", "Train with several numbers of processes, and say how well it scales."),
    "plan": ("plan:plan", "Predict memory and step time of each strategy, and recommend one."),
    "export": ("export:export", "Export a run's model as a package."),
    "registry": ("registry:app", "List, tag, copy and roll back packages."),
    "serve": ("serve:serve", "Serve packages over HTTP: the Open Inference Protocol v2."),
    "predict": ("predict:predict", "Predict with a package or a server: images, rows, files."),
    "bench": ("bench:app", "Measure Paceline beside a hand-written loop and its peers."),
    "version": ("version:version", "Print the versions of Paceline and of what it builds on."),
}
_USAGE = {
    "train": "[OPTIONS] TASK",
    "resume": "[OPTIONS] RUN",
    "tune": "[OPTIONS] TASK",
    "launch": "--on NAME [OPTIONS] -- COMMAND...",
    "doctor": "[OPTIONS] [TASK]",
    "chaos": "[OPTIONS] TASK",
    "verify": "[OPTIONS] TASK",
    "scan": "[OPTIONS] TASK",
}
"""Of the commands with the most options: cyclopts would inspect them all once more to find it out."""

for _name, (_place, _help) in _COMMANDS.items():
    _more = {"usage": f"Usage: paceline {_name} {_USAGE[_name]}"} if _name in _USAGE else {}
    app.command(f"paceline.cli.{_place}", name=_name, help=_help, **_more)


def main() -> int:
    """Run the command line; return the exit code."""
    try:
        words = _given(sys.argv[1:])
        code: object = 0
        if _asks_for_help(words):
            app.help_print(words[:-1])
        else:
            code = app(words, exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _has_lost_its_reader(sys.stdout):
            raise
        # Python's own flush at exit must not fail on it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code
    except CycloptsError as error:
        command = " ".join(["paceline", *(error.command_chain or ())])
        print(f"paceline: {_explain(error)} See: {command} --help", file=sys.stderr)
        return ConfigError.exit_code
    except KeyboardInterrupt:
        return 130
    return code if isinstance(code, int) else 0


def _has_lost_its_reader(output: TextIO) -> bool:
    """Whether nobody reads what we print any more: ``| head`` has seen enough."""
    poll = select.poll()
    poll.register(output.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _given(words: list[str]) -> list[str]:
    """What the user wrote: ``torch.distributed.launch`` adds an option of its own, beside the variable."""
    if "LOCAL_RANK" not in os.environ:
        return words
    return [word for word in words if not word.startswith(("--local-rank=", "--local_rank="))]


def _asks_for_help(words: list[str]) -> bool:
    """Whether a command's help is all that is wanted, for which its options need not be parsed first."""
    return len(words) > 1 and words[0] in _COMMANDS and words[-1] in ("--help", "-h") and "--" not in words


def _unknown(error: UnknownOptionError) -> str:
    """An option that is nobody's, or another launcher's than the one in question."""
    from paceline.launchers.own_options import own_flags, whose

    flag = error.token.keyword or error.token.value
    owners = whose(flag)
    with suppress(ConfigError, IndexError, ValueError):  # no launcher was named, or none of ours
        on = sys.argv[sys.argv.index("--on") + 1]
        known = own_flags(on)
        if owners:
            return f"--on {on} knows no {flag}. {owners}--on {on} takes: {known}."
        return f"{error} --on {on} takes, besides what all launchers do: {known}."
    return f"{error} {owners}".rstrip()


def _explain(error: CycloptsError) -> str:
    """What is wrong with the command line, in a sentence."""
    from paceline.config import RunConfig, config_from_mapping

    if isinstance(error, UnusedCliTokensError):
        return f"there is nothing to do with {' '.join(map(repr, error.unused_tokens or ()))}."
    if isinstance(error, UnknownOptionError):
        return _unknown(error)
    if isinstance(error, CoercionError) and error.token is not None:
        field = (error.token.keyword or "").lstrip("-").replace("-", "_")
        if field in RunConfig.__dataclass_fields__:
            try:
                config_from_mapping({field: error.token.value}, "the command line")
            except ConfigError as known:
                return str(known)
    return str(error)
