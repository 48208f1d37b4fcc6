"""What the facts of the machines mean."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paceline.launch.preflight.probes import Connection, Flow
from paceline.launch.preflight.spec import (
    Check,
    Pair,
    PreflightResults,
    Status,
    common_interfaces,
    is_slow,
    is_very_slow,
    known_rates,
)

# --- Whether the GPUs are there, healthy, and alike ---


_DIRECT = ("NV", "PIX", "PXB")
_BUSY_MIB = 1024


def judge_gpus(findings: PreflightResults) -> Iterable[Check]:
    """All checks of GPUs; where no machine has one and none was asked for, one that says so."""
    asked = findings.examination.gpus_per_node
    if not asked and not any(f["gpus"]["gpus"] or f["gpus"]["error"] for f in findings.facts.values()):
        yield Check(id="gpus", where="all", status="pass", found="none, and none was asked for")
        return
    for node in findings.facts:
        yield _usable(findings, node)
        gpus = findings.facts[node]["gpus"]
        if gpus["gpus"]:
            yield _health(findings.name(node), gpus)
        if gpus["links"]:
            yield _links(findings.name(node), gpus["links"])
    yield from _alike(findings)


def _usable(findings: PreflightResults, node: int) -> Check:
    name, asked = findings.name(node), findings.examination.gpus_per_node
    facts, torch = findings.facts[node]["gpus"], findings.facts[node]["torch"]
    count, usable = len(facts["gpus"]), int(torch.get("gpus", 0))
    models = ", ".join(sorted({gpu["name"] for gpu in facts["gpus"]}))
    wanted = f", {asked} asked for" if asked is not None else ""
    if facts["error"]:
        return Check(
            id="gpus",
            where=name,
            status="fail",
            found=f"nvidia-smi: {facts['error']}",
            advice="Reload the driver or restart the machine, or exclude it from the job",
        )
    if count < (asked or 0):
        return Check(
            id="gpus",
            where=name,
            status="fail",
            found=f"{count} {'GPUs' if count != 1 else 'GPU'}{wanted}",
            advice="Ask the cluster for machines with GPUs (--gpus-per-node), give the container access to "
            "them, or exclude this machine"
            if count == 0
            else "Ask for fewer, or exclude this machine",
        )
    if "error" not in torch and usable < (asked if asked is not None else count):
        built = torch["cuda"]
        return Check(
            id="gpus",
            where=name,
            status="fail",
            found=f"{count} x {models}, but torch sees {usable}"
            + (" (it is built without CUDA)" if built is None else f" (built for CUDA {built})"),
            advice="Install torch for CUDA"
            if built is None
            else f"Look at CUDA_VISIBLE_DEVICES; the driver runs CUDA up to {facts['cuda']}",
        )
    if count and findings.processes_on(node) > (usable or count):
        return Check(
            id="gpus",
            where=name,
            status="warn",
            found=f"{findings.processes_on(node)} processes for {usable or count} GPUs",
            advice=f"Use --nproc {usable or count}: NCCL takes one process a GPU",
        )
    return Check(id="gpus", where=name, status="pass", found=f"{count} x {models}{wanted}" if count else "none")


def _health(name: str, facts: dict[str, Any]) -> Check:
    bad, slow = [], []
    for gpu in facts["gpus"]:
        label = f"GPU {gpu['index']}"
        if gpu["uncorrected_errors"]:
            bad.append(f"{label} has {gpu['uncorrected_errors']} uncorrected memory errors")
        if gpu["slowed_by"]:
            at = "" if gpu["temperature_c"] is None else f" at {gpu['temperature_c']} °C"
            slow.append(f"{label} is slowed{at} ({', '.join(gpu['slowed_by'])})")
        if (gpu["used_mib"] or 0) > _BUSY_MIB:
            slow.append(f"{label} has {gpu['used_mib']} MiB in use already")
    bad += (facts["xids"] or [])[-4:]
    if bad:
        return Check(
            id="gpu-health",
            where=name,
            status="fail",
            found="; ".join([*bad, *slow]),
            advice="Reset the GPU or restart the machine; exclude it from the job if it comes again",
        )
    if slow:
        return Check(
            id="gpu-health",
            where=name,
            status="warn",
            found="; ".join(slow),
            advice="Look at its cooling and power, and for other processes: nvidia-smi",
        )
    log = "" if facts["xids"] is not None else "; the kernel's log cannot be read, so Xid errors are not known"
    return Check(id="gpu-health", where=name, status="pass", found=f"no errors, no throttling{log}")


def _links(name: str, links: dict[str, str]) -> Check:
    kinds = sorted(set(links.values()))
    far = [pair for pair, link in links.items() if not link.startswith(_DIRECT)]
    mixed = far and len(far) < len(links)
    found = ", ".join(kinds)
    if mixed:
        return Check(
            id="gpu-links",
            where=name,
            status="warn",
            found=f"{found}; over the CPU: {', '.join(far[:6])}{', ...' if len(far) > 6 else ''}",
            advice="The slowest link sets the pace: with fewer processes, choose GPUs that are near each "
            "other (CUDA_VISIBLE_DEVICES)",
        )
    return Check(id="gpu-links", where=name, status="pass", found=found)


def _alike(findings: PreflightResults) -> Iterable[Check]:
    kinds: dict[str, list[str]] = {}
    for node, facts in findings.facts.items():
        for text in {f"{gpu['name']}, driver {gpu['driver']}" for gpu in facts["gpus"]["gpus"]}:
            kinds.setdefault(text, []).append(findings.name(node))
    if len(kinds) > 1:
        found = "; ".join(f"{text} ({', '.join(names)})" for text, names in kinds.items())
        yield Check(
            id="gpus",
            where="all",
            status="warn",
            found=found,
            advice="Bits differ between GPU models and drivers, and the slowest sets the pace: ask the "
            "cluster for one kind",
        )


# --- Whether each machine has the disk, memory, files and cores that the job needs ---


_GIB = 1 << 30
_MIB = 1 << 20
_STATE = 3  # a checkpoint holds the weights, and up to two moments of each in the optimizer
_SHM_LEAST, _SHM_GOOD = 16 * _MIB, 64 * _MIB  # a process
_RDMA_LOCKS = _GIB


def judge_machine(findings: PreflightResults) -> Iterable[Check]:
    """All checks of single machines: one for all where it passes everywhere."""
    yield from _run_directory(findings)
    for judged in (_disk_space, _shared_memory, _open_files, _locked_memory, _cpus):
        yield from _each(findings, judged)


def _each(findings: PreflightResults, judged: Callable[[PreflightResults, int], Check | None]) -> Iterable[Check]:
    """A check of each machine; equal ones are one."""
    equal: dict[tuple[str, str], list[Check]] = {}
    for node in findings.facts:
        check = judged(findings, node)
        if check is not None:
            equal.setdefault((check.status, check.found), []).append(check)
    for checks in equal.values():
        everywhere = 1 < len(checks) == len(findings.facts)
        where = "all" if everywhere else ", ".join(check.where for check in checks)
        yield dataclasses.replace(checks[0], where=where)


def _run_directory(findings: PreflightResults) -> Iterable[Check]:
    well = True
    marked = [node for node, storage in findings.storage.items() if storage["error"] is None]
    for node, storage in findings.storage.items():
        name, path = findings.name(node), storage["path"]
        others = [other for other in marked if other != node]
        unseen = [other for other in others if other not in storage["seen"]]
        if storage["error"] is not None:
            well = False
            yield Check(
                id="run-directory",
                where=name,
                status="fail",
                found=f"{path} cannot be written: {storage['error']}",
                advice="Choose another with --run-dir, or mend the disk or its permissions",
            )
        if unseen and (node != 0 or len(unseen) == len(others)):
            well = False
            yield Check(
                id="run-directory",
                where=name,
                status="fail",
                found=f"{path} is not the directory of {', '.join(map(findings.name, unseen))}",
                advice="Choose a directory that all machines share (NFS, Lustre) with --run-dir, and mount it on "
                "each of them",
            )
        if not storage["hard_links"]:
            well = False
            yield Check(
                id="run-directory",
                where=name,
                status="warn",
                found=f"{path} takes no hard links",
                advice="Where machines lose each other, exactly half of them cannot go on: the lease is a hard link",
            )
    if well and findings.storage:
        shared = "shared and writable" if len(findings.storage) > 1 else "writable"
        yield Check(id="run-directory", where="all", status="pass", found=f"{findings.storage[0]['path']} is {shared}")


def _disk_space(findings: PreflightResults, node: int) -> Check | None:
    storage = findings.storage.get(node)
    if storage is None or storage["free"] is None:
        return None
    free, keep = storage["free"], findings.examination.keep
    size, how = _checkpoint_bytes(findings)
    # One is written before the oldest is removed; those that are there take no more room.
    there = min(len(storage["checkpoints"]), keep)
    needed = (keep + 1 - there) * size if size is not None else _GIB
    what = "a checkpoint's size is not known" if size is None else f"{keep} + 1 checkpoints of {how}{_size(size)}"
    if there:
        what += f", of which {there} {'is' if there == 1 else 'are'} there"
    status: Status = "pass" if free >= needed else "warn" if size is None else "fail"
    return Check(
        id="disk-space",
        where=findings.name(node),
        status=status,
        found=f"{storage['path']} has {_size(free)} free; {what}",
        advice=""
        if status == "pass"
        else "Give --checkpoint-size, or a larger disk with --run-dir"
        if size is None
        else f"{_size(needed)} are needed: "
        f"{'make room there' if there else 'choose a larger disk with --run-dir, or fewer with --keep-checkpoints'}",
    )


def _checkpoint_bytes(findings: PreflightResults) -> tuple[int | None, str]:
    """The size of a checkpoint, and "about " where it is only estimated."""
    if findings.examination.checkpoint_bytes is not None:
        return findings.examination.checkpoint_bytes, ""
    there = [size for storage in findings.storage.values() for size in storage["checkpoints"]]
    if there:
        return max(there), ""
    for facts in findings.facts.values():
        task: dict[str, Any] = facts["task"] or {}
        if task.get("model_bytes") is not None:
            return _STATE * int(task["model_bytes"]), "about "
    return None, ""


def _shared_memory(findings: PreflightResults, node: int) -> Check:
    free, nproc = findings.facts[node]["shm_free"], findings.processes_on(node)
    name = findings.name(node)
    if free is None or free < nproc * _SHM_GOOD:
        fails = free is None or free < nproc * _SHM_LEAST
        return Check(
            id="shared-memory",
            where=name,
            status="fail" if fails else "warn",
            found="there is no /dev/shm" if free is None else f"{_size(free)} for {nproc} processes",
            advice="Start the container with --shm-size=8g (in Kubernetes: an emptyDir with medium: Memory)",
        )
    return Check(id="shared-memory", where=name, status="pass", found=f"at least {_size(nproc * _SHM_GOOD)} free")


def _open_files(findings: PreflightResults, node: int) -> Check:
    facts, name = findings.facts[node], findings.name(node)
    world_size = sum(findings.processes_on(each) for each in range(findings.nodes))
    soft, hard = facts["open_files"], facts["most_open_files"]
    needed = 512 + 4 * world_size  # a gloo rank has connections to all others, twice at a change
    if soft is not None and soft < needed:
        may = hard is None or hard >= needed
        return Check(
            id="open-files",
            where=name,
            status="fail",
            found=f"ulimit -n is {soft}, and {needed} are needed",
            advice="Run ulimit -n 65536 before the job starts"
            if may
            else f"Its hard limit is {hard}: raise it in /etc/security/limits.conf, or by LimitNOFILE",
        )
    return Check(
        id="open-files",
        where=name,
        status="pass",
        found="no limit" if soft is None else f"ulimit -n is {soft}",
    )


def _locked_memory(findings: PreflightResults, node: int) -> Check | None:
    facts, name = findings.facts[node], findings.name(node)
    limit, rdma = facts["locked_memory"], ", ".join(facts["rdma"])
    if not rdma:
        return Check(id="locked-memory", where=name, status="pass", found="there is no RDMA device")
    if limit is not None and limit < _RDMA_LOCKS:
        return Check(
            id="locked-memory",
            where=name,
            status="warn",
            found=f"ulimit -l is {_size(limit)}, and there is {rdma}",
            advice="Set memlock to unlimited in /etc/security/limits.conf (for Slurm: "
            "PropagateResourceLimitsExcept=MEMLOCK), or NCCL cannot use RDMA",
        )
    shown = "no limit" if limit is None else f"ulimit -l is {_size(limit)}"
    return Check(id="locked-memory", where=name, status="pass", found=f"{shown}, for {rdma}")


def _cpus(findings: PreflightResults, node: int) -> Check:
    facts, name = findings.facts[node], findings.name(node)
    usable = min(facts["usable_cores"], facts["core_quota"] or facts["usable_cores"])
    nproc, threads = findings.processes_on(node), findings.examination.threads or 1
    found = f"{usable:g} of {facts['cores']} cores for {nproc} x {threads} threads"
    if nproc * threads > usable:
        bound = facts["usable_cores"] < facts["cores"]
        quota = facts["core_quota"] is not None and facts["core_quota"] < facts["usable_cores"]
        return Check(
            id="cpus",
            where=name,
            status="warn",
            found=found,
            advice="The job is bound to a part of them: ask for more (--cpus-per-task), or use fewer threads"
            if bound
            else "The container has a quota: raise it, or use fewer --threads"
            if quota
            else "Use fewer processes or --threads",
        )
    return Check(id="cpus", where=name, status="pass", found=found)


def _size(count: int | float) -> str:
    for unit, size in (("GiB", _GIB), ("MiB", _MIB), ("KiB", 1024)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:g} bytes"


# --- Whether the machines reach each other, and how fast ---


_FASTER = 3.0  # another interface, before it is recommended
_NEARER = 2.0  # another machine 0
_NEAR_MS = 0.5
_CLOCK_WARNS_S, _CLOCK_FAILS_S = 1.0, 10.0


def judge_network(findings: PreflightResults) -> Iterable[Check]:
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


def _ports(findings: PreflightResults) -> Iterable[Check]:
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
    kinds: list[tuple[Mapping[Pair, Connection], str]] = [
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


def _interface(findings: PreflightResults) -> Iterable[Check]:
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


def _address_problems(findings: PreflightResults) -> list[Check]:
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


def _interface_used(findings: PreflightResults) -> list[Check]:
    return [Check(id="interface", where="all", status="pass", found=_used(findings))]


def faster_interface(findings: PreflightResults) -> str | None:
    """The interface over which all machines were seen to reach each other much faster than over their own."""
    best = max(findings.other_flows, key=lambda name: _slowest(findings.other_flows[name]), default=None)
    if best is None or _slowest(findings.other_flows[best]) <= _FASTER * _slowest(findings.flows):
        return None
    return best


def chosen_interface(findings: PreflightResults) -> str | None:
    """That interface, where the job that follows is going to use it: it names none of its own."""
    named = findings.examination.interface is not None
    return faster_interface(findings) if findings.examination.preflight and not named else None


def _used(findings: PreflightResults) -> str:
    return ", ".join(sorted({str(facts["interface"]) for facts in findings.facts.values()}))


def _bandwidth(findings: PreflightResults) -> Iterable[Check]:
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


def _rendezvous(findings: PreflightResults) -> Iterable[Check]:
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


def _host_names(findings: PreflightResults) -> Iterable[Check]:
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


def _clocks(findings: PreflightResults) -> Iterable[Check]:
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


def _all_reduce(findings: PreflightResults) -> Iterable[Check]:
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


# --- From findings to checks: pure functions, one for each kind of thing that can be wrong ---


def judge(findings: PreflightResults) -> list[Check]:
    """All checks, passed ones too: one for each machine, or one for all where they are compared."""
    return [
        *_machines(findings),
        *_software(findings),
        *judge_gpus(findings),
        *judge_network(findings),
        *judge_machine(findings),
    ]


def _machines(findings: PreflightResults) -> Iterable[Check]:
    for node, why in findings.absent.items():
        yield Check(
            id="machines",
            where=findings.name(node),
            status="fail",
            found=why,
            advice="Look at what it printed; see that it was started, that the machines share the job's "
            "directory, and that no firewall stands between it and machine 0",
        )
    there = ", ".join(findings.name(node) for node in findings.facts)
    if not findings.absent:
        yield Check(id="machines", where="all", status="pass", found=there)


def _software(findings: PreflightResults) -> Iterable[Check]:
    facts = findings.facts
    pythons = {node: each["python"] for node, each in facts.items()}
    minor = {node: text.rpartition(".")[0] for node, text in pythons.items()}
    if len(set(pythons.values())) > 1:
        yield Check(
            id="python",
            where="all",
            status="fail" if len(set(minor.values())) > 1 else "warn",
            found=_differing(pythons, findings.name),
            advice="Start the job with one --python, or use one image or environment on all machines",
        )
    else:
        yield Check(id="python", where="all", status="pass", found=pythons[0])
    yield _libraries(findings)
    for name in ("torch", "task"):
        yield from _imports(findings, name)


def _libraries(findings: PreflightResults) -> Check:
    """What Paceline builds on must be equal; anything else that differs is worth a warning."""
    names = {name for facts in findings.facts.values() for name in facts["libraries"]}
    needed = set(findings.facts[0]["needed"]) | {"paceline"}
    # Each of these speaks with its own kind on the other machines, or comes from torch's wheel.
    speaking = ("ray", "horovod", "tensorflow", "mpi4py", "deepspeed", "accelerate", "lightning", "nvidia-")
    differing: dict[str, str] = {}
    for name in sorted(names):
        versions = {node: facts["libraries"].get(name, "missing") for node, facts in findings.facts.items()}
        if len(set(versions.values())) > 1:
            differing[name] = _differing(versions, findings.name)
    bad = [name for name in differing if name in needed or name.startswith(speaking)]
    if not differing:
        found = f"{len(names)} distributions are equal" if len(findings.facts) > 1 else f"{len(names)} distributions"
        return Check(id="libraries", where="all", status="pass", found=found)
    shown = [f"{name}: {differing[name]}" for name in [*bad, *(n for n in differing if n not in bad)]]
    more = f"; and {len(shown) - 8} more" if len(shown) > 8 else ""
    return Check(
        id="libraries",
        where="all",
        status="fail" if bad else "warn",
        found="; ".join(shown[:8]) + more,
        advice="Use one environment or image on all machines; pip install --require-hashes from a lock file "
        "makes it so",
    )


def _imports(findings: PreflightResults, name: str) -> Iterable[Check]:
    there = {node: facts[name] for node, facts in findings.facts.items() if facts[name] is not None}
    whole: dict[int, str] = {}
    for node, imported in there.items():
        if "error" in imported:
            yield Check(
                id=name,
                where=findings.name(node),
                status="fail",
                found=imported["error"],
                advice="Install it there: pip install 'torch==2.13.*'"
                if name == "torch"
                else "Make the task's file and what it imports available there: install it, or share it",
            )
        elif name == "torch":
            parts = {"CUDA": imported["cuda"], "cuDNN": imported["cudnn"], "NCCL": imported["nccl"]}
            words = [f"{part} {version}" for part, version in parts.items() if version is not None]
            whole[node] = ", ".join([imported["version"], *words])
        else:
            size = imported["model_bytes"]
            whole[node] = "" if size is None else f", a model of {size / 2**20:.1f} MiB"
    if len(set(whole.values())) > 1:
        yield Check(
            id=name,
            where="all",
            status="fail",
            found=_differing(whole, findings.name),
            advice="Use one environment or image on all machines",
        )
    elif whole:
        [text] = set(whole.values())
        found = text if name == "torch" else f"{findings.examination.task}{text}"
        yield Check(id=name, where=_where(list(whole), findings), status="pass", found=found)


def _where(nodes: list[int], findings: PreflightResults) -> str:
    return "all" if len(nodes) == len(findings.facts) else ", ".join(map(findings.name, nodes))


def _differing(values: Mapping[int, str], name: Callable[[int], str]) -> str:
    """``1.2 (3 machines), 1.3 (b)``: the most frequent first."""
    parts = []
    for value, count in Counter(values.values()).most_common():
        who = [name(node) for node, each in values.items() if each == value]
        parts.append(f"{value} ({who[0] if count == 1 else f'{count} machines'})")
    return ", ".join(parts)
