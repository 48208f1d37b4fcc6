"""The doctor's program for one machine: ``python -m paceline.doctor.node OPTIONS``.

Machine 0 leads the examination and leaves the report; the others do what it asks for, and learn the verdict.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.agent.link import LinkError
from paceline.distributed.environment import detect_environment
from paceline.distributed.process import ECHO_S, STOP_SIGNALS, StopRequests, signals_handled
from paceline.doctor.checks import Report, make_report
from paceline.doctor.conductor import Conductor, Here, Machine, There
from paceline.doctor.examination import Examination, Place, parse_command
from paceline.doctor.examiner import Examiner, choose_address
from paceline.doctor.findings import Findings
from paceline.doctor.judge_network import chosen_interface
from paceline.doctor.judgement import judge
from paceline.doctor.meeting import Arrivals, await_machines, find_machine_0, make_token, remove_traces
from paceline.errors import LaunchError, PacelineError
from paceline.launchers.preflight import choose_interface
from paceline.run_directory import write_atomically

REPORT = "report.json"
"""A file in the examination's directory."""

_NEXT_S = 900.0


def main(argv: list[str]) -> int:
    """Examine; 0 where a report came about and, before a job, nothing failed."""
    examination, place = parse_command(argv)
    try:
        if detect_environment().local_rank > 0:
            return 0  # a launcher of ranks has started several here, and one is enough
        with stoppable():
            if place.node_rank != 0:
                return _follow(examination, place)
            alone = examination.preflight and place.nodes == 1
            report = lead_alone(examination, place) if alone else lead(examination, place)
        if examination.preflight:
            _say(report)
            if report.status != "fail" and _choose(report.interface):
                print(f"paceline: preflight: the job uses --interface {report.interface}.", file=sys.stderr)
        return 1 if examination.preflight and report.status == "fail" else 0
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as asked:
        return 128 + next(iter(asked.args), signal.SIGINT)


@contextmanager
def stoppable() -> Iterator[None]:
    """Inside, any request to stop is what Ctrl-C is, so that nothing is left behind; it holds the signal.

    The same request may come from a launcher too: that must not interrupt the cleaning up.
    """
    requests = StopRequests(ECHO_S)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if requests.hear(number) != "again":
            raise KeyboardInterrupt(number)

    with signals_handled(STOP_SIGNALS, interrupt):
        yield


def lead_alone(examination: Examination, place: Place) -> Report:
    """Examine the only machine there is; its directory is not used."""
    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as directory:
        return lead(dataclasses.replace(examination, directory=Path(directory)), place)


def lead(examination: Examination, place: Place) -> Report:
    """Machine 0: examine all machines, and write the report.

    Raises:
        ConfigError: the directory cannot be written.
    """
    arrivals = Arrivals()
    with ExitStack() as stack:
        stack.callback(remove_traces, examination.directory)
        token = make_token(examination.directory)
        findings = Findings(examination=examination, nodes=place.nodes, port=place.master_port)
        address = choose_address(examination.interface, place)
        examiner = Examiner(examination, place, address, token)
        stack.callback(examiner.close)
        if place.nodes > 1:
            arrivals = await_machines(examination.directory, place, address, token, examination.timeout_s)
            for channel in arrivals.channels.values():
                stack.callback(channel.close)
        findings.port_problem = arrivals.port_problem
        findings.hosts = arrivals.hosts
        findings.absent = _absent(arrivals, examination, place)
        machines: dict[int, Machine] = {0: Here(examiner)}
        machines |= {node: There(channel) for node, channel in sorted(arrivals.channels.items())}
        Conductor(machines, findings).examine()
        names = tuple(map(findings.name, range(place.nodes)))
        report = make_report(names, judge(findings), chosen_interface(findings))
        text = json.dumps(report.to_json(), indent=1) + "\n"
        write_atomically(examination.directory / REPORT, text.encode())
        # The job begins where this ends: the port is to be free before anybody looks for its rank 0.
        examiner.close()
        for channel in arrivals.channels.values():
            channel.send({"end": report.status, "interface": report.interface})
        return report


def _absent(arrivals: Arrivals, examination: Examination, place: Place) -> dict[int, str]:
    """Why machines are not there, as far as they or those that were refused have said."""
    reasons = {}
    for node in range(1, place.nodes):
        if node not in arrivals.channels:
            said = arrivals.problems.get(node)
            reasons[node] = said or f"nothing was heard of it within {examination.timeout_s:g} s"
            if not said and arrivals.strangers:
                reasons[node] += (
                    f". Who came does not see {examination.directory}, or is no machine of this job: "
                    f"{' '.join(arrivals.strangers).removesuffix('.')}"
                )
    return reasons


def _follow(examination: Examination, place: Place) -> int:
    """Any other machine: do what machine 0 asks for, until it knows."""
    channel, token = find_machine_0(examination.directory, place, examination.timeout_s)
    address = choose_address(examination.interface, place)
    examiner = Examiner(examination, place, address, token)
    try:
        while True:
            # Machine 0 may still be waiting for others.
            message = channel.next(examination.timeout_s + _NEXT_S)
            if "end" in message:
                _choose(message["interface"])
                return 1 if examination.preflight and message["end"] == "fail" else 0
            channel.send(_answer(examiner, message))
    except LinkError as error:
        raise LaunchError(f"machine 0 ended the examination: {error}") from error
    finally:
        channel.close()
        examiner.close()


def _answer(examiner: Examiner, message: dict[str, Any]) -> dict[str, Any]:
    if message["ask"] == "time":
        return {"result": time.time()}
    try:
        return {"result": examiner.perform(message["ask"], message["arguments"])}
    except (PacelineError, OSError) as error:
        return {"error": str(error)}


def _choose(interface: str | None) -> bool:
    """Have the job use this interface; whether it will."""
    return interface is not None and choose_interface(interface)


def _say(report: Report) -> None:
    """Before a job: what is not as it should be, in lines."""
    for check in report.checks:
        if check.status != "pass":
            print(
                f"paceline: preflight {check.status}: {check.where}: {check.found}. {check.advice}".rstrip(),
                file=sys.stderr,
            )
    if report.status == "fail":
        print("paceline: the job is not started.", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
