"""Checks: pure functions from the facts of the nodes to verdicts."""

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
from paceline.runs.file_system import NODE_LOCKS, Lack

# --- GPUs: present, healthy and equal ---


_DIRECT = ("NV", "PIX", "PXB")
_BUSY_MIB = 1024


def check_gpus(results: PreflightResults) -> Iterable[Check]:
    """Check the GPUs; if there are none and none were requested, return one passed check."""
    requested = results.spec.gpus_per_node
    if not requested and not any(f["gpus"]["gpus"] or f["gpus"]["error"] for f in results.facts.values()):
        yield Check(id="gpus", where="all", status="pass", found="none, and none requested")
        return
    for node in results.facts:
        yield _check_usable(results, node)
        gpus = results.facts[node]["gpus"]
        if gpus["gpus"]:
            yield _check_health(results.name(node), gpus)
        if gpus["links"]:
            yield _check_links(results.name(node), gpus["links"])
    yield from _check_equal(results)


def _check_usable(results: PreflightResults, node: int) -> Check:
    name, requested = results.name(node), results.spec.gpus_per_node
    facts, torch = results.facts[node]["gpus"], results.facts[node]["torch"]
    count, usable = len(facts["gpus"]), int(torch.get("gpus", 0))
    models = ", ".join(sorted({gpu["name"] for gpu in facts["gpus"]}))
    requested_text = f", {requested} requested" if requested is not None else ""
    if facts["error"]:
        return Check(
            id="gpus",
            where=name,
            status="fail",
            found=f"nvidia-smi: {facts['error']}",
            advice="Reload the driver or restart the node, or exclude it from the job",
        )
    if count < (requested or 0):
        return Check(
            id="gpus",
            where=name,
            status="fail",
            found=f"{count} {'GPUs' if count != 1 else 'GPU'}{requested_text}",
            advice="Request nodes with GPUs (--gpus-per-node), give the container access to them, or exclude this node"
            if count == 0
            else "Request fewer, or exclude this node",
        )
    # CUDA_VISIBLE_DEVICES may leave some out on purpose.
    expected = min(count, torch.get("visible", count)) if requested is None else requested
    if "error" not in torch and usable < expected:
        cuda_version = torch["cuda"]
        return Check(
            id="gpus",
            where=name,
            status="fail",
            found=f"{count} x {models}, but torch sees {usable}"
            + (" (its build has no CUDA)" if cuda_version is None else f" (built for CUDA {cuda_version})"),
            advice="Install torch for CUDA"
            if cuda_version is None
            else f"Check CUDA_VISIBLE_DEVICES; the driver supports CUDA up to {facts['cuda']}",
        )
    if count and results.processes_on(node) > (usable or count):
        return Check(
            id="gpus",
            where=name,
            status="warn",
            found=f"{results.processes_on(node)} processes for {usable or count} GPUs",
            advice=f"Use --nproc {usable or count}: NCCL needs one process per GPU",
        )
    return Check(id="gpus", where=name, status="pass", found=f"{count} x {models}{requested_text}" if count else "none")


def _check_health(name: str, facts: dict[str, Any]) -> Check:
    errors, warnings = [], []
    for gpu in facts["gpus"]:
        label = f"GPU {gpu['index']}"
        if gpu["uncorrected_errors"]:
            errors.append(f"{label} has {gpu['uncorrected_errors']} uncorrected memory errors")
        if gpu["slowed_by"]:
            temperature = "" if gpu["temperature_c"] is None else f" at {gpu['temperature_c']} °C"
            warnings.append(f"{label} is slowed{temperature} ({', '.join(gpu['slowed_by'])})")
        if (gpu["used_mib"] or 0) > _BUSY_MIB:
            warnings.append(f"{label} has {gpu['used_mib']} MiB already in use")
    errors += (facts["xids"] or [])[-4:]
    if errors:
        return Check(
            id="gpu-health",
            where=name,
            status="fail",
            found="; ".join([*errors, *warnings]),
            advice="Reset the GPU or restart the node; exclude it from the job if the error comes back",
        )
    if warnings:
        return Check(
            id="gpu-health",
            where=name,
            status="warn",
            found="; ".join(warnings),
            advice="Check its cooling, power and other processes: nvidia-smi",
        )
    log = "" if facts["xids"] is not None else "; the kernel's log cannot be read, so Xid errors are unknown"
    return Check(id="gpu-health", where=name, status="pass", found=f"no errors, no throttling{log}")


def _check_links(name: str, links: dict[str, str]) -> Check:
    kinds = sorted(set(links.values()))
    indirect = [pair for pair, link in links.items() if not link.startswith(_DIRECT)]
    is_mixed = indirect and len(indirect) < len(links)
    found = ", ".join(kinds)
    if is_mixed:
        return Check(
            id="gpu-links",
            where=name,
            status="warn",
            found=f"{found}; over the CPU: {', '.join(indirect[:6])}{', ...' if len(indirect) > 6 else ''}",
            advice="The slowest link limits the speed: with fewer processes, choose GPUs that are close to each "
            "other (CUDA_VISIBLE_DEVICES)",
        )
    return Check(id="gpu-links", where=name, status="pass", found=found)


def _check_equal(results: PreflightResults) -> Iterable[Check]:
    kinds: dict[str, list[str]] = {}
    for node, facts in results.facts.items():
        for text in {f"{gpu['name']}, driver {gpu['driver']}" for gpu in facts["gpus"]["gpus"]}:
            kinds.setdefault(text, []).append(results.name(node))
    if len(kinds) > 1:
        found = "; ".join(f"{text} ({', '.join(names)})" for text, names in kinds.items())
        yield Check(
            id="gpus",
            where="all",
            status="warn",
            found=found,
            advice="Bits differ between GPU models and drivers, and the slowest limits the speed: request one "
            "kind from the cluster",
        )


# --- Single nodes: disk, memory, files and cores ---


_GIB = 1 << 30
_MIB = 1 << 20
_CHECKPOINT_FACTOR = 3  # a checkpoint holds the weights and up to two optimizer moments of each
_SHM_MIN, _SHM_RECOMMENDED = 16 * _MIB, 64 * _MIB  # per process
_MIN_RDMA_LOCKED = _GIB


def check_nodes(results: PreflightResults) -> Iterable[Check]:
    """Run all checks of single nodes, merging checks that pass everywhere."""
    yield from _check_run_directory(results)
    for check_node in (_check_disk_space, _check_shared_memory, _check_open_files, _check_locked_memory, _check_cpus):
        yield from _check_each(results, check_node)


def _check_each(
    results: PreflightResults, check_node: Callable[[PreflightResults, int], Check | None]
) -> Iterable[Check]:
    """Check each node, and merge equal results."""
    merged: dict[tuple[str, str], list[Check]] = {}
    for node in results.facts:
        check = check_node(results, node)
        if check is not None:
            merged.setdefault((check.status, check.found), []).append(check)
    for checks in merged.values():
        is_everywhere = 1 < len(checks) == len(results.facts)
        where = "all" if is_everywhere else ", ".join(check.where for check in checks)
        yield dataclasses.replace(checks[0], where=where)


def _check_run_directory(results: PreflightResults) -> Iterable[Check]:
    passed = True
    writable = [node for node, storage in results.storage.items() if storage["error"] is None]
    for node, storage in results.storage.items():
        name, path = results.name(node), storage["path"]
        other_nodes = [other for other in writable if other != node]
        unseen = [other for other in other_nodes if other not in storage["seen"]]
        if storage["error"] is not None:
            passed = False
            yield Check(
                id="run-directory",
                where=name,
                status="fail",
                found=f"{path} cannot be written: {storage['error']}",
                advice="Choose another with --run-dir, or repair the disk or its permissions",
            )
        if unseen and (node != 0 or len(unseen) == len(other_nodes)):
            passed = False
            yield Check(
                id="run-directory",
                where=name,
                status="fail",
                found=f"{path} is not the directory of {', '.join(map(results.name, unseen))}",
                advice="Choose a directory that all nodes share (NFS, Lustre) with --run-dir, and mount it on "
                "each of them",
            )
    lacking: dict[Lack, list[str]] = {}
    for node, storage in results.storage.items():
        for lack in [*map(Lack._make, storage["lacks"]), *([NODE_LOCKS] if storage["unlocked"] else [])]:
            lacking.setdefault(lack, []).append(results.name(node))
    for lack, names in lacking.items():
        passed = False
        where = "all" if 1 < len(names) == len(results.storage) else ", ".join(names)
        found = f"{results.storage[0]['path']} {lack.found}"
        yield Check(id="run-directory", where=where, status="warn", found=found, advice=lack.advice)
    if passed and results.storage:
        shared = "shared and writable" if len(results.storage) > 1 else "writable"
        yield Check(id="run-directory", where="all", status="pass", found=f"{results.storage[0]['path']} is {shared}")


def _check_disk_space(results: PreflightResults, node: int) -> Check | None:
    storage = results.storage.get(node)
    if storage is None or storage["free"] is None:
        return None
    free, keep = storage["free"], results.spec.keep
    size, approximation = _checkpoint_bytes(results)
    # A new checkpoint is written before the oldest is removed; existing ones need no more space.
    num_existing = min(len(storage["checkpoints"]), keep)
    needed = (keep + 1 - num_existing) * size if size is not None else _GIB
    description = (
        "a checkpoint's size is unknown" if size is None else f"{keep} + 1 checkpoints of {approximation}{_size(size)}"
    )
    if num_existing:
        description += f", of which {num_existing} {'exists' if num_existing == 1 else 'exist'}"
    status: Status = "pass" if free >= needed else "warn" if size is None else "fail"
    return Check(
        id="disk-space",
        where=results.name(node),
        status=status,
        found=f"{storage['path']} has {_size(free)} free; {description}",
        advice=""
        if status == "pass"
        else "Give --checkpoint-size, or choose a larger disk with --run-dir"
        if size is None
        else f"{_size(needed)} are needed: "
        f"{'free some space' if num_existing else 'choose a larger disk with --run-dir, or reduce --keep-checkpoints'}",
    )


def _checkpoint_bytes(results: PreflightResults) -> tuple[int | None, str]:
    """Return the size of a checkpoint, and "about " if it is an estimate."""
    if results.spec.checkpoint_bytes is not None:
        return results.spec.checkpoint_bytes, ""
    sizes = [size for storage in results.storage.values() for size in storage["checkpoints"]]
    if sizes:
        return max(sizes), ""
    for facts in results.facts.values():
        task: dict[str, Any] = facts["task"] or {}
        if task.get("model_bytes") is not None:
            return _CHECKPOINT_FACTOR * int(task["model_bytes"]), "about "
    return None, ""


def _check_shared_memory(results: PreflightResults, node: int) -> Check:
    free, nproc = results.facts[node]["shm_free"], results.processes_on(node)
    name = results.name(node)
    if free is None or free < nproc * _SHM_RECOMMENDED:
        is_too_small = free is None or free < nproc * _SHM_MIN
        return Check(
            id="shared-memory",
            where=name,
            status="fail" if is_too_small else "warn",
            found="/dev/shm does not exist" if free is None else f"{_size(free)} for {nproc} processes",
            advice="Start the container with --shm-size=8g (in Kubernetes: an emptyDir with medium: Memory)",
        )
    return Check(
        id="shared-memory", where=name, status="pass", found=f"at least {_size(nproc * _SHM_RECOMMENDED)} free"
    )


def _check_open_files(results: PreflightResults, node: int) -> Check:
    facts, name = results.facts[node], results.name(node)
    world_size = sum(results.processes_on(number) for number in range(results.nodes))
    soft, hard = facts["open_files"], facts["most_open_files"]
    needed = 512 + 4 * world_size  # a gloo rank connects to all others, twice while a group changes
    if soft is not None and soft < needed:
        can_raise = hard is None or hard >= needed
        return Check(
            id="open-files",
            where=name,
            status="fail",
            found=f"ulimit -n is {soft}, but must be {needed}",
            advice="Run ulimit -n 65536 before the job starts"
            if can_raise
            else f"The hard limit is {hard}: raise it in /etc/security/limits.conf, or with LimitNOFILE",
        )
    return Check(
        id="open-files",
        where=name,
        status="pass",
        found="no limit" if soft is None else f"ulimit -n is {soft}",
    )


def _check_locked_memory(results: PreflightResults, node: int) -> Check | None:
    facts, name = results.facts[node], results.name(node)
    limit, rdma = facts["locked_memory"], ", ".join(facts["rdma"])
    if not rdma:
        return Check(id="locked-memory", where=name, status="pass", found="no RDMA device")
    if limit is not None and limit < _MIN_RDMA_LOCKED:
        return Check(
            id="locked-memory",
            where=name,
            status="warn",
            found=f"ulimit -l is {_size(limit)}, too low for {rdma}",
            advice="Set memlock to unlimited in /etc/security/limits.conf (for Slurm: "
            "PropagateResourceLimitsExcept=MEMLOCK), or NCCL cannot use RDMA",
        )
    shown = "no limit" if limit is None else f"ulimit -l is {_size(limit)}"
    return Check(id="locked-memory", where=name, status="pass", found=f"{shown}, for {rdma}")


def _check_cpus(results: PreflightResults, node: int) -> Check:
    facts, name = results.facts[node], results.name(node)
    usable = min(facts["usable_cores"], facts["core_quota"] or facts["usable_cores"])
    nproc, threads = results.processes_on(node), results.spec.threads or 1
    found = f"{usable:g} of {facts['cores']} cores for {nproc} x {threads} threads"
    if nproc * threads > usable:
        is_bound = facts["usable_cores"] < facts["cores"]
        has_quota = facts["core_quota"] is not None and facts["core_quota"] < facts["usable_cores"]
        return Check(
            id="cpus",
            where=name,
            status="warn",
            found=found,
            advice="The job is bound to some of the cores: request more (--cpus-per-task), or use fewer threads"
            if is_bound
            else "The container has a quota: raise it, or use fewer --threads"
            if has_quota
            else "Use fewer processes or --threads",
        )
    return Check(id="cpus", where=name, status="pass", found=found)


def _size(count: int | float) -> str:
    for unit, size in (("GiB", _GIB), ("MiB", _MIB), ("KiB", 1024)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:g} bytes"


# --- The network: connections, addresses, speed, clocks ---


_MIN_INTERFACE_RATIO = 3.0  # speed of another interface, to recommend it
_MIN_LATENCY_RATIO = 2.0  # latency of node 0, to recommend another one
_LOW_LATENCY_MS = 0.5
_CLOCK_WARNS_S, _CLOCK_FAILS_S = 1.0, 10.0


def check_network(results: PreflightResults) -> Iterable[Check]:
    """Check the network between the nodes; for a single node, the interface that it will use."""
    if results.nodes == 1:
        if results.spec.interface is not None:
            yield from _address_problems(results) or _interface_used(results)
        yield from _check_all_reduce(results)
        return
    yield from _check_ports(results)
    yield from _check_interface(results)
    yield from _check_bandwidth(results)
    yield from _check_rendezvous(results)
    yield from _check_host_names(results)
    yield from _check_clocks(results)
    yield from _check_all_reduce(results)


def _check_ports(results: PreflightResults) -> Iterable[Check]:
    passed = True
    if results.port_problem:
        passed = False
        yield Check(
            id="ports",
            where=results.name(0),
            status="fail",
            found=f"it cannot listen on port {results.port}: {results.port_problem}",
            advice="End the program that uses it, or choose another port with --master-port",
        )
    kinds: list[tuple[Mapping[Pair, Connection], str]] = [
        (results.rendezvous, f"port {results.port}"),
        (results.data, "ephemeral ports"),
    ]
    for connections, label in kinds:
        for pair, connection in connections.items():
            if connection["error"] is not None:
                passed = False
                others = results.data if connections is results.rendezvous else results.rendezvous
                is_other_open = others.get(pair, connection)["error"] is None
                # Only rank 0's node listens on the rendezvous port.
                is_needed = connections is results.data or pair[1] == 0
                yield Check(
                    id="ports",
                    where=results.pair(pair),
                    status="fail" if is_needed else "warn",
                    found=f"{label} of {results.facts[pair[1]]['address']}: {connection['error']}",
                    advice=f"A firewall blocks this port, but not others: open TCP port {results.port}, or choose "
                    "another with --master-port"
                    if is_other_open and connections is results.rendezvous
                    else "A firewall blocks these ports, but not the rendezvous port: open TCP ports 1024-65535 "
                    "between the nodes of a job"
                    if is_other_open
                    else "There is no connection: check the address, the routes and the firewall, or choose "
                    "another network with --interface",
                )
    if passed and results.data:
        yield Check(
            id="ports",
            where="all",
            status="pass",
            found=f"every pair connects, on port {results.port} and on ephemeral ports",
        )


def _check_interface(results: PreflightResults) -> Iterable[Check]:
    problems = _address_problems(results)
    yield from problems
    passed = not problems
    best = faster_interface(results)
    if best is not None:
        passed = False
        used = _slowest(results.flows)
        yield Check(
            id="interface",
            where="all",
            status="warn",
            found=f"{_used(results)} would be used, at {_rate(used)}; {best} has "
            f"{_rate(_slowest(results.other_flows[best]))}",
            advice=f"Give --interface {best}",
        )
    common = common_interfaces(results.facts)
    for node, facts in results.facts.items():
        speeds = {i["name"]: i["mbit_per_s"] for i in facts["interfaces"] if i["name"] in common}
        fastest = max(speeds, key=lambda name: speeds[name], default=None)
        if passed and fastest is not None and speeds[fastest] > speeds.get(facts["interface"], 0) > 0:
            passed = False
            yield Check(
                id="interface",
                where=results.name(node),
                status="warn",
                found=f"{facts['interface']} would be used, with {speeds[facts['interface']]} Mbit/s; "
                f"{fastest} has {speeds[fastest]}",
                advice=f"Give --interface {fastest}",
            )
    if passed:
        yield from _interface_used(results)


def _address_problems(results: PreflightResults) -> list[Check]:
    """Check the requested interface and the nodes' addresses."""
    problems = []
    for node, facts in results.facts.items():
        if facts["address_problem"]:
            names = ", ".join(f"{interface['name']} ({interface['address']})" for interface in facts["interfaces"])
            check = Check(
                id="interface",
                where=results.name(node),
                status="fail",
                found=facts["address_problem"].rstrip("."),
                advice=f"Give --interface one of: {names}" if names else "Leave out --interface",
            )
            problems.append(check)
    return problems


def _interface_used(results: PreflightResults) -> list[Check]:
    return [Check(id="interface", where="all", status="pass", found=_used(results))]


def faster_interface(results: PreflightResults) -> str | None:
    """Return the interface over which all nodes reach each other much faster than over their own, if any."""
    best = max(results.other_flows, key=lambda name: _slowest(results.other_flows[name]), default=None)
    if best is None or _slowest(results.other_flows[best]) <= _MIN_INTERFACE_RATIO * _slowest(results.flows):
        return None
    return best


def chosen_interface(results: PreflightResults) -> str | None:
    """Return the faster interface, if the following job will use it because it names none of its own."""
    has_interface = results.spec.interface is not None
    return faster_interface(results) if results.spec.preflight and not has_interface else None


def _used(results: PreflightResults) -> str:
    return ", ".join(sorted({str(facts["interface"]) for facts in results.facts.values()}))


def _check_bandwidth(results: PreflightResults) -> Iterable[Check]:
    interface = chosen_interface(results)
    rates = known_rates(results.flows if interface is None else results.other_flows[interface])
    if not rates:
        return
    best, passed = max(rates.values()), True
    for pair, rate in sorted(rates.items(), key=lambda item: item[1]):
        if is_slow(rate, best):
            passed = False
            yield Check(
                id="bandwidth",
                where=results.pair(pair),
                status="fail" if is_very_slow(rate, best) else "warn",
                found=f"{_rate(rate)}; the fastest link has {_rate(best)}",
                advice="Check the cable, the switch port, its negotiated speed (ethtool) and other "
                "traffic; a ring of nodes is as fast as its slowest link",
            )
    if passed:
        median = statistics.median(rates.values())
        yield Check(
            id="bandwidth",
            where="all",
            status="pass",
            found=f"{_rate(min(rates.values()))} to {_rate(best)}, median {_rate(median)}, one TCP stream",
        )


def _check_rendezvous(results: PreflightResults) -> Iterable[Check]:
    """Check that node 0, which serves the rendezvous, is close to the others; with two nodes, both are."""
    medians = {}
    for node in results.facts:
        times = [
            connection["ms"]
            for (_, to), connection in results.data.items()
            if to == node and connection["ms"] is not None
        ]
        if times:
            medians[node] = statistics.median(times)
    if results.nodes < 3 or not medians:
        return
    best = min(medians, key=lambda node: medians[node])
    own = medians.get(0)
    if own is not None and own > _LOW_LATENCY_MS and own > _MIN_LATENCY_RATIO * medians[best]:
        yield Check(
            id="rendezvous",
            where=results.name(0),
            status="warn",
            found=f"the other nodes reach it in {own:.2f} ms, but {results.name(best)} in {medians[best]:.2f} ms",
            advice=f"Make {results.name(best)} node 0: list it first",
        )
    elif own is not None:
        yield Check(
            id="rendezvous",
            where=results.name(0),
            status="pass",
            found=f"the other nodes reach it in {own:.2f} ms (round trip)",
        )


def _check_host_names(results: PreflightResults) -> Iterable[Check]:
    """Check the address of each node's own name, which gloo announces unless an interface is given."""
    interface = results.spec.interface or chosen_interface(results)
    agents = results.spec.agents
    passed = True
    for node, facts in results.facts.items():
        loopback = [address for address in facts["named"] if address.startswith("127.")]
        if loopback or not facts["named"]:
            passed = False
            resolution = f"resolves to {', '.join(loopback)}" if loopback else "does not resolve"
            found = f"its own name, {facts['host']}, {resolution}"
            if interface is not None:
                yield Check(
                    id="host-name",
                    where=results.name(node),
                    status="pass",
                    found=f"{found}; the job uses the address of {interface}",
                )
                continue
            yield Check(
                id="host-name",
                where=results.name(node),
                status="fail" if loopback and not agents else "warn",
                found=found,
                advice=f"Map {facts['host']} to {facts['address']} in its /etc/hosts; until then, use "
                f"--interface {facts['interface']}, which keeps gloo from announcing the loopback address"
                + (", as Paceline's agents do without --recover none" if agents else ""),
            )
    if passed:
        yield Check(id="host-name", where="all", status="pass", found="resolve to addresses on the network")


def _check_clocks(results: PreflightResults) -> Iterable[Check]:
    passed = True
    for node, (ahead_s, error_s) in results.clock_s.items():
        if abs(ahead_s) - error_s > _CLOCK_WARNS_S:
            passed = False
            yield Check(
                id="clock",
                where=results.name(node),
                status="fail" if abs(ahead_s) - error_s > _CLOCK_FAILS_S else "warn",
                found=f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} {results.name(0)}",
                advice="Start its time service (chronyd or systemd-timesyncd): otherwise tokens expire early and logs "
                "are misleading",
            )
    if passed and results.clock_s:
        worst = max(abs(ahead_s) for ahead_s, _ in results.clock_s.values())
        yield Check(id="clock", where="all", status="pass", found=f"within {worst * 1e3:.1f} ms")


def _check_all_reduce(results: PreflightResults) -> Iterable[Check]:
    result = results.all_reduce
    if result is None:
        status: Status = "pass" if results.no_all_reduce.startswith("there is only one") else "warn"
        advice = "" if status == "pass" else "Correct the problems above first"
        yield Check(
            id="all-reduce",
            where="all",
            status=status,
            found=f"not run: {results.no_all_reduce}",
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
    """Return the speed of a ring over these links; 0 if one of them does not work."""
    rates = known_rates(flows)
    return min(rates.values()) if len(rates) == len(flows) > 0 else 0.0


def _rate(bytes_per_s: float) -> str:
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.1f} Mbit/s"


# --- All checks ---


def run_checks(results: PreflightResults) -> list[Check]:
    """Run all checks; the result contains passed checks, merged where nodes are compared."""
    return [
        *_check_presence(results),
        *_check_software(results),
        *check_gpus(results),
        *check_network(results),
        *check_nodes(results),
    ]


def _check_presence(results: PreflightResults) -> Iterable[Check]:
    for node, reason in results.absent.items():
        yield Check(
            id="machines",
            where=results.name(node),
            status="fail",
            found=reason,
            advice="Check its output; check that it was started, that the nodes share the job's directory, and that "
            "no firewall blocks it from node 0",
        )
    names = ", ".join(results.name(node) for node in results.facts)
    if not results.absent:
        yield Check(id="machines", where="all", status="pass", found=names)


def _check_software(results: PreflightResults) -> Iterable[Check]:
    facts = results.facts
    pythons = {node: facts_of_node["python"] for node, facts_of_node in facts.items()}
    minor = {node: text.rpartition(".")[0] for node, text in pythons.items()}
    if len(set(pythons.values())) > 1:
        yield Check(
            id="python",
            where="all",
            status="fail" if len(set(minor.values())) > 1 else "warn",
            found=_differing(pythons, results.name),
            advice="Start the job with one --python, or use one image or environment on all nodes",
        )
    else:
        yield Check(id="python", where="all", status="pass", found=pythons[0])
    yield _check_libraries(results)
    for name in ("torch", "task"):
        yield from _check_imports(results, name)


def _check_libraries(results: PreflightResults) -> Check:
    """Check the installed versions: Paceline's own dependencies must be equal; other differences are warnings."""
    names = {name for facts in results.facts.values() for name in facts["libraries"]}
    needed = set(results.facts[0]["needed"]) | {"paceline"}
    # These communicate with their counterparts on other nodes, or come from torch's wheel.
    communicating = ("ray", "horovod", "tensorflow", "mpi4py", "deepspeed", "accelerate", "lightning", "nvidia-")
    differing: dict[str, str] = {}
    for name in sorted(names):
        versions = {node: facts["libraries"].get(name, "missing") for node, facts in results.facts.items()}
        if len(set(versions.values())) > 1:
            differing[name] = _differing(versions, results.name)
    errors = [name for name in differing if name in needed or name.startswith(communicating)]
    if not differing:
        found = f"{len(names)} distributions are equal" if len(results.facts) > 1 else f"{len(names)} distributions"
        return Check(id="libraries", where="all", status="pass", found=found)
    shown = [f"{name}: {differing[name]}" for name in [*errors, *(n for n in differing if n not in errors)]]
    more = f"; and {len(shown) - 8} more" if len(shown) > 8 else ""
    return Check(
        id="libraries",
        where="all",
        status="fail" if errors else "warn",
        found="; ".join(shown[:8]) + more,
        advice="Use one environment or image on all nodes; pip install --require-hashes from a lock file ensures this",
    )


def _check_imports(results: PreflightResults, name: str) -> Iterable[Check]:
    facts_of_nodes = {node: facts[name] for node, facts in results.facts.items() if facts[name] is not None}
    summaries: dict[int, str] = {}
    for node, imported in facts_of_nodes.items():
        if "error" in imported:
            yield Check(
                id=name,
                where=results.name(node),
                status="fail",
                found=imported["error"],
                advice="Install it on this node: pip install 'torch>=2.11'"
                if name == "torch"
                else "Make the task's file and its imports available on this node: install or share them",
            )
        elif name == "torch":
            parts = {"CUDA": imported["cuda"], "cuDNN": imported["cudnn"], "NCCL": imported["nccl"]}
            words = [f"{part} {version}" for part, version in parts.items() if version is not None]
            summaries[node] = ", ".join([imported["version"], *words])
        else:
            size = imported["model_bytes"]
            summaries[node] = "" if size is None else f", a model of {size / 2**20:.1f} MiB"
    if len(set(summaries.values())) > 1:
        yield Check(
            id=name,
            where="all",
            status="fail",
            found=_differing(summaries, results.name),
            advice="Use one environment or image on all nodes",
        )
    elif summaries:
        [text] = set(summaries.values())
        found = text if name == "torch" else f"{results.spec.task}{text}"
        yield Check(id=name, where=_where(list(summaries), results), status="pass", found=found)


def _where(nodes: list[int], results: PreflightResults) -> str:
    return "all" if len(nodes) == len(results.facts) else ", ".join(map(results.name, nodes))


def _differing(values: Mapping[int, str], name: Callable[[int], str]) -> str:
    """Return ``1.2 (3 nodes), 1.3 (b)``, the most frequent first."""
    parts = []
    for value, count in Counter(values.values()).most_common():
        names = [name(node) for node, other in values.items() if other == value]
        parts.append(f"{value} ({names[0] if count == 1 else f'{count} nodes'})")
    return ", ".join(parts)
