"""The ``paceline`` command: its commands, each imported when it is used."""

from __future__ import annotations

import errno
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import Self, TextIO, cast

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    Group,
    MissingArgumentError,
    Parameter,
    UnknownOptionError,
    UnusedCliTokensError,
)

from paceline import __version__
from paceline.core.built_in import COMMANDS, PACKAGES, TASK_PREFIXES
from paceline.core.errors import ConfigError, LaunchError, PacelineError
from paceline.core.standard_streams import PrintableStream, escape_controls


def _check_paths(kind: object, value: object) -> None:
    if isinstance(value, Path):
        from paceline.core.files import check_path

        check_path(value, "the path")


app = App(
    name="paceline",
    help="Exact, reproducible distributed training on PyTorch.",
    version=__version__,
    result_action="return_value",
    default_parameter=Parameter(validator=_check_paths),
    help_format="plaintext",  # Markdown's renderer takes longer to import than all of ours
)
_MOVED = {
    ("revalidate",): "paceline revalidate is now an option of report: paceline report RUN|PACKAGE --check",
    ("bench", "scaling"): (
        "paceline bench scaling has left the package; in a checkout of the repository, type: "
        "python -m benchmarks scaling TASK --nproc 1 2 4 -- OPTIONS"
    ),
}
"""Former commands, and what to type instead."""

_GROUPS = {name: Group(name, sort_key=n) for n, name in enumerate(dict.fromkeys(c.group for c in COMMANDS.values()))}
for _index, (_name, _its) in enumerate(COMMANDS.items()):
    _more = {} if _its.usage is None else {"usage": f"Usage: paceline {_name} {_its.usage}"}
    app.command(_its.reference, name=_name, help=_its.help, group=_GROUPS[_its.group], sort_key=_index, **_more)
# The last line of the list of commands describes --help.
app["--help"].group = app["--version"].group = Group("", show=False)
_HELP_FLAGS = ("--help", "-h", "--help-all")
_LINES = "\n\t"
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP)
"""Errors of a disk that say something about a file's owner, mode or place, and nothing about this code."""


def main() -> int:
    """Run the command line; return the exit code."""
    arguments = _user_arguments(sys.argv[1:])
    with ExitStack() as stack:
        if arguments[:1] and not (arguments[0] in COMMANDS and COMMANDS[arguments[0]].computes):
            stack.enter_context(redirect_stdout(cast("TextIO", PrintableStream(sys.stdout))))
            stack.enter_context(redirect_stderr(cast("TextIO", PrintableStream(sys.stderr))))
        return _run(arguments)


class _Interrupts:
    """Notes Ctrl-C, which a library that is being imported may turn into an error of its own.

    Only where Python's own handler would raise: commands that stop in another way replace this one.
    """

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> Self:
        self._is_ours = threading.current_thread() is threading.main_thread()
        self._is_ours = self._is_ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._is_ours:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        raise KeyboardInterrupt


def _run(arguments: list[str]) -> int:
    with _Interrupts() as interrupts:
        try:
            _require_current_directory()
            _require_text(arguments)
            threading.Thread(target=int).start()  # without room for one, OpenBLAS would end this process like Ctrl-C
            return _call(arguments)
        except (PacelineError, CycloptsError) as error:
            if not interrupts.seen:
                return _report(error)
        except Exception as error:
            from paceline.core.files import FULL

            if isinstance(error, OSError) and error.errno in FULL:
                _discard_output()
                print(f"paceline: {error.strerror}. {FULL[error.errno]}, and repeat the command.", file=sys.stderr)
                return PacelineError.exit_code
            if not interrupts.seen:
                return _report(_of_this_machine(error))
        except KeyboardInterrupt:
            pass
        return 130


def _of_this_machine(error: Exception) -> PacelineError:
    """Return what to do about an error of files or limits; raise any other one again."""
    from paceline.core.plugins import missing_part
    from paceline.runs.failures import advise

    missing = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
    if isinstance(missing, ModuleNotFoundError) and missing.name in PACKAGES:
        return missing_part(missing)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        longest = max(str(error.filename or "").split(os.sep), key=len)
        return ConfigError(f"a file's name has at most 255 bytes; shorten {longest!r:.80}.")
    if isinstance(error, OSError) and error.errno in _DENIED and error.filename is not None:
        return ConfigError(
            f"cannot use {error.filename}: {error.strerror}. Check its owner and path, or choose another."
        )
    if advice := advise(str(error)):
        return LaunchError(f"{error}. {advice[0]}")
    raise error


def _call(arguments: list[str]) -> int:
    for words, remedy in _MOVED.items():
        if tuple(arguments[: len(words)]) == words:
            raise ConfigError(remedy)
    try:
        code: object = 0
        if _is_help_request(arguments):
            # Imported here because no other command needs it.
            from paceline.cli.help import print_help

            own = _own_arguments(arguments)
            path = [word for word in own if word not in _HELP_FLAGS]
            print_help(app, path, everything="--help-all" in own)
        else:
            code = app(_expand_task_prefix(arguments), exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_pipe_closed(sys.stdout):
            raise
        _discard_output()
        return 0
    return code if isinstance(code, int) else 0


def _require_current_directory() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the current directory cannot be used ({error.strerror}): it has been removed, or is not yours to enter. "
            "Change to another one, and repeat the command."
        ) from error


def _require_text(arguments: Sequence[str]) -> None:
    """Refuse bytes that no record of a run or job could hold."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"{escape_controls(argument)} has bytes that are not {sys.getfilesystemencoding()}. Rename the file or "
                "folder, or use a locale with UTF-8, such as LC_ALL=C.UTF-8."
            ) from None


def _report(error: PacelineError | CycloptsError) -> int:
    """Print a deliberate error, and return its exit code."""
    if isinstance(error, PacelineError):
        print(f"paceline: {escape_controls(str(error), keep=_LINES)}", file=sys.stderr)
        return error.exit_code
    command = " ".join(["paceline", *_command(error)])
    print(f"paceline: {_explain(error)} See: {command} --help", file=sys.stderr)
    return ConfigError.exit_code


def _discard_output() -> None:
    """Keep Python's own flush at exit from failing again on an output that takes nothing."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_pipe_closed(output: TextIO) -> bool:
    """Return whether the reader of our output has gone, as after ``| head``."""
    poll = select.poll()
    poll.register(output.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _user_arguments(words: list[str]) -> list[str]:
    """Drop the option that ``torch.distributed.launch`` adds in addition to the variable."""
    others = [word for word in words if not word.startswith(("--local-rank=", "--local_rank="))]
    if len(others) == len(words):
        return words
    from paceline.core.environment import has_local_rank

    return others if has_local_rank() else words


def _expand_task_prefix(words: list[str]) -> list[str]:
    """Replace a task such as ``hf:DIR``, and the flags of its fields, by the task's class and ``--set``.

    Raises:
        ConfigError: a flag lacks its value.
    """
    own = _own_arguments(words)
    named = next((word for word in own[1:] if ":" in word and word.partition(":")[0] in TASK_PREFIXES), None)
    if named is None:
        return words
    prefix, _, value = named.partition(":")
    task, expanded, rest = TASK_PREFIXES[prefix], [], iter(own)
    for word in rest:
        flag, separator, given = word.partition("=")
        field = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else ""
        if word == named:
            expanded += [task.reference, "--set", f"{task.field}={value}"]
        elif field not in task.flags:
            expanded.append(word)
        else:
            if not separator:
                given = next(rest, "--") if task.flags[field][0] else "true"
            if given.startswith("--"):
                raise ConfigError(f"{flag} needs a value.")
            expanded += ["--set", f"{field}={given}"]
    return [*expanded, *words[len(own) :]]


def _own_arguments(words: list[str]) -> list[str]:
    """Return the command's own arguments, without those of a program that it starts."""
    return words[: words.index("--")] if "--" in words else words


def _is_help_request(words: list[str]) -> bool:
    """Return whether the user asked for a command's help, so that its options need not be parsed."""
    own = _own_arguments(words)
    return any(flag in own for flag in _HELP_FLAGS) and (own[0] in _HELP_FLAGS or own[0] in COMMANDS)


def _explain_unknown_option(error: UnknownOptionError) -> str:
    """Explain an option that does not exist, or that another launcher has."""
    from paceline.core.config import missing_options
    from paceline.launch.launcher import own_flags, owners_of, torchrun_equal

    flag = error.token.keyword or error.token.value
    if _command(error) == ["launch"] and (equal := torchrun_equal(flag)):
        return equal
    owners, unknown = owners_of(flag), f"{error} {missing_options()}".rstrip()
    with suppress(ConfigError, IndexError, ValueError):  # no --on, or not one of our launchers
        words = _own_arguments(error.root_input_tokens or [])
        on = words[words.index("--on") + 1]
        known = own_flags(on)
        if owners:
            return f"{flag} is not supported by --on {on}. {owners}--on {on} takes: {known}."
        return f"{unknown} --on {on} also takes: {known}."
    return f"{unknown} {owners}".rstrip()


def _explain_missing(option: str, *, is_positional: bool) -> str:
    from paceline.core.plugins import all_names

    if is_positional:
        return f"{option.lstrip('-').replace('-', '_').upper()} is missing."
    names = f", one of {', '.join(all_names('paceline.launchers'))}" if option == "--on" else ""
    return f"{option} needs a value{names}."


def _command(error: CycloptsError) -> list[str]:
    """Return the command whose arguments are wrong, such as ["launch"]."""
    return list(error.command_chain or ())


def _explain(error: CycloptsError) -> str:
    """Return a sentence that says what is wrong with the command line."""
    from paceline.core.config import all_options, config_from_mapping

    if isinstance(error, UnusedCliTokensError):
        problem = f"unexpected argument: {' '.join(map(repr, error.unused_tokens or []))}."
        return " ".join([problem, *(COMMANDS[name].one_argument for name in _command(error)[:1])]).rstrip()
    if isinstance(error, UnknownOptionError):
        return _explain_unknown_option(error)
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        return _explain_missing(error.argument.name, is_positional=error.argument.field_info.is_positional)
    if isinstance(error, CoercionError) and error.token is not None:
        field = (error.token.keyword or "").lstrip("-").replace("-", "_")
        if field in all_options():
            try:
                config_from_mapping({field: error.token.value}, "the command line")
            except ConfigError as known:
                return str(known)
    return str(error)
