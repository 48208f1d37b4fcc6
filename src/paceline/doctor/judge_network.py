"""Whether the machines reach each other, and how fast."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from paceline.doctor.checks import Check, Status
from paceline.doctor.findings import Findings, Pair, common_interfaces, is_slow, is_very_slow, known_rates
from paceline.doctor.probes import Flow, Way

_FASTER = 3.0  # another interface, before it is recommended
_NEARER = 2.0  # another machine 0
_NEAR_MS = 0.5
_CLOCK_WARNS_S, _CLOCK_FAILS_S = 1.0, 10.0


def judge_network(findings: Findings) -> Iterable[Check]:
    """All checks of what is between the machines; of one alone, of the interface that it is to use."""
    if findings.nodes == 1:
        if findings.examination.interface is not None:
            yield from _address_problems(findings) or _interface_used(findings)
        yield from _all_reduce(findings)
        return
    yield from _ports(findings)
    yield from _interface(findings)
    yield from _bandwidth(findings)
    yield from _rendezvous(findings)
    yield from _host_names(findings)
    yield from _clocks(findings)
    yield from _all_reduce(findings)


def _ports(findings: Findings) -> Iterable[Check]:
    well = True
    if findings.port_problem:
        well = False
        yield Check(
            id="ports",
            where=findings.name(0),
            status="fail",
            found=f"it cannot listen on port {findings.port}: {findings.port_problem}",
            advice="End the program that has it, or choose another one with --master-port",
        )
    kinds: list[tuple[Mapping[Pair, Way], str]] = [
        (findings.rendezvous, f"port {findings.port}"),
        (findings.data, "ports that the kernel chooses"),
    ]
    for ways, what in kinds:
        for pair, way in ways.items():
            if way["error"] is not None:
                well = False
                other = findings.data if ways is findings.rendezvous else findings.rendezvous
                alone = other.get(pair, way)["error"] is None
                # Only rank 0's machine listens on the rendezvous port.
                matters = ways is findings.data or pair[1] == 0
                yield Check(
                    id="ports",
                    where=findings.pair(pair),
                    status="fail" if matters else "warn",
                    found=f"{what} of {findings.facts[pair[1]]['address']}: {way['error']}",
                    advice="A firewall lets other ports through, and not this one: open TCP port "
                    f"{findings.port}, or choose another with --master-port"
                    if alone and ways is findings.rendezvous
                    else "A firewall lets the rendezvous port through, and not these: open TCP ports "
                    "1024-65535 between the machines of a job"
                    if alone
                    else "There is no way: look at the address, the routes and the firewall, or choose "
                    "another network with --interface",
                )
    if well and findings.data:
        yield Check(
            id="ports",
            where="all",
            status="pass",
            found=f"every pair connects, on port {findings.port} and on ports that the kernel chooses",
        )


def _interface(findings: Findings) -> Iterable[Check]:
    problems = _address_problems(findings)
    yield from problems
    well = not problems
    best = faster_interface(findings)
    if best is not None:
        well = False
        used = _slowest(findings.flows)
        yield Check(
            id="interface",
            where="all",
            status="warn",
            found=f"{_used(findings)} would be used, at {_rate(used)}; {best} has "
            f"{_rate(_slowest(findings.other_flows[best]))}",
            advice=f"Give --interface {best}",
        )
    common = common_interfaces(findings.facts)
    for node, facts in findings.facts.items():
        speeds = {i["name"]: i["mbit_per_s"] for i in facts["interfaces"] if i["name"] in common}
        fastest = max(speeds, key=lambda name: speeds[name], default=None)
        if well and fastest is not None and speeds[fastest] > speeds.get(facts["interface"], 0) > 0:
            well = False
            yield Check(
                id="interface",
                where=findings.name(node),
                status="warn",
                found=f"{facts['interface']} would be used, a link of {speeds[facts['interface']]} Mbit/s; "
                f"{fastest} is one of {speeds[fastest]}",
                advice=f"Give --interface {fastest}",
            )
    if well:
        yield from _interface_used(findings)


def _address_problems(findings: Findings) -> list[Check]:
    """What is wrong with the interface or the address that was asked for."""
    problems = []
    for node, facts in findings.facts.items():
        if facts["address_problem"]:
            names = ", ".join(f"{each['name']} ({each['address']})" for each in facts["interfaces"])
            check = Check(
                id="interface",
                where=findings.name(node),
                status="fail",
                found=facts["address_problem"].rstrip("."),
                advice=f"Give --interface one of: {names}" if names else "Leave out --interface",
            )
            problems.append(check)
    return problems


def _interface_used(findings: Findings) -> list[Check]:
    return [Check(id="interface", where="all", status="pass", found=_used(findings))]


def faster_interface(findings: Findings) -> str | None:
    """The interface over which all machines were seen to reach each other much faster than over their own."""
    best = max(findings.other_flows, key=lambda name: _slowest(findings.other_flows[name]), default=None)
    if best is None or _slowest(findings.other_flows[best]) <= _FASTER * _slowest(findings.flows):
        return None
    return best


def chosen_interface(findings: Findings) -> str | None:
    """That interface, where the job that follows is going to use it: it names none of its own."""
    named = findings.examination.interface is not None
    return faster_interface(findings) if findings.examination.preflight and not named else None


def _used(findings: Findings) -> str:
    return ", ".join(sorted({str(facts["interface"]) for facts in findings.facts.values()}))


def _bandwidth(findings: Findings) -> Iterable[Check]:
    chosen = chosen_interface(findings)
    rates = known_rates(findings.flows if chosen is None else findings.other_flows[chosen])
    if not rates:
        return
    best, well = max(rates.values()), True
    for pair, rate in sorted(rates.items(), key=lambda item: item[1]):
        if is_slow(rate, best):
            well = False
            yield Check(
                id="bandwidth",
                where=findings.pair(pair),
                status="fail" if is_very_slow(rate, best) else "warn",
                found=f"{_rate(rate)}; the fastest link has {_rate(best)}",
                advice="Look at the cable, the switch port and its negotiated speed (ethtool), and for other "
                "traffic; a ring of machines is as fast as its slowest link",
            )
    if well:
        median = statistics.median(rates.values())
        yield Check(
            id="bandwidth",
            where="all",
            status="pass",
            found=f"{_rate(min(rates.values()))} to {_rate(best)}, median {_rate(median)}, one TCP stream",
        )


def _rendezvous(findings: Findings) -> Iterable[Check]:
    """Machine 0 answers every rank at the start, and at each change; of two machines, either is as near."""
    medians = {}
    for node in findings.facts:
        times = [way["ms"] for (_, to), way in findings.data.items() if to == node and way["ms"] is not None]
        if times:
            medians[node] = statistics.median(times)
    if findings.nodes < 3 or not medians:
        return
    best = min(medians, key=lambda node: medians[node])
    own = medians.get(0)
    if own is not None and own > _NEAR_MS and own > _NEARER * medians[best]:
        yield Check(
            id="rendezvous",
            where=findings.name(0),
            status="warn",
            found=f"the others reach it in {own:.2f} ms, and {findings.name(best)} in {medians[best]:.2f} ms",
            advice=f"Let {findings.name(best)} be machine 0: list it first",
        )
    elif own is not None:
        yield Check(
            id="rendezvous",
            where=findings.name(0),
            status="pass",
            found=f"the others reach it in {own:.2f} ms (round trip)",
        )


def _host_names(findings: Findings) -> Iterable[Check]:
    """Who is told no interface announces the address of its machine's name."""
    told = findings.examination.interface or chosen_interface(findings)
    agents = findings.examination.agents
    well = True
    for node, facts in findings.facts.items():
        loopback = [address for address in facts["named"] if address.startswith("127.")]
        if loopback or not facts["named"]:
            well = False
            says = f"resolves to {', '.join(loopback)}" if loopback else "does not resolve"
            found = f"its own name, {facts['host']}, {says} there"
            if told is not None:
                yield Check(
                    id="host-name",
                    where=findings.name(node),
                    status="pass",
                    found=f"{found}; the job goes by the address of {told}",
                )
                continue
            yield Check(
                id="host-name",
                where=findings.name(node),
                status="fail" if loopback and not agents else "warn",
                found=found,
                advice=f"In its /etc/hosts, give {facts['host']} the address {facts['address']}; until then, "
                f"--interface {facts['interface']} keeps gloo from announcing the loopback address"
                + (", as Paceline's agents do unless --recover is none" if agents else ""),
            )
    if well:
        yield Check(id="host-name", where="all", status="pass", found="resolve to addresses on the network")


def _clocks(findings: Findings) -> Iterable[Check]:
    well = True
    for node, (ahead_s, error_s) in findings.clock_s.items():
        if abs(ahead_s) - error_s > _CLOCK_WARNS_S:
            well = False
            yield Check(
                id="clock",
                where=findings.name(node),
                status="fail" if abs(ahead_s) - error_s > _CLOCK_FAILS_S else "warn",
                found=f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} {findings.name(0)}",
                advice="Start its time service (chronyd or systemd-timesyncd); tokens expire early and logs "
                "mislead where clocks differ",
            )
    if well and findings.clock_s:
        worst = max(abs(ahead_s) for ahead_s, _ in findings.clock_s.values())
        yield Check(id="clock", where="all", status="pass", found=f"within {worst * 1e3:.1f} ms")


def _all_reduce(findings: Findings) -> Iterable[Check]:
    result = findings.all_reduce
    if result is None:
        status: Status = "pass" if findings.no_all_reduce.startswith("there is one") else "warn"
        advice = "" if status == "pass" else "Mend what is named above first"
        yield Check(
            id="all-reduce",
            where="all",
            status=status,
            found=f"not tried: {findings.no_all_reduce}",
            advice=advice,
        )
    elif "error" in result or not result["right"]:
        yield Check(
            id="all-reduce",
            where="all",
            status="fail",
            found=result.get("error", "its sum is wrong"),
            advice="Run the job with --comm-debug, which logs what gloo and NCCL do",
        )
    else:
        yield Check(
            id="all-reduce",
            where="all",
            status="pass",
            found=f"{result['backend']}, {result['ranks']} ranks, {result['bytes'] >> 10} KiB in "
            f"{result['ms']:.1f} ms: "
            f"{_rate(result['bytes_per_s'])} bus bandwidth",
        )


def _slowest(flows: Mapping[Pair, Flow]) -> float:
    """What a ring over these links is as fast as; 0 where one of them does not work."""
    rates = known_rates(flows)
    return min(rates.values()) if len(rates) == len(flows) > 0 else 0.0


def _rate(bytes_per_s: float) -> str:
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.1f} Mbit/s"
