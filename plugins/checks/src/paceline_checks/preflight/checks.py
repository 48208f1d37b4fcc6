"""Checks: pure functions from the facts of the nodes to a report."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from paceline.runs.file_system import NODE_LOCKS, Lack
from paceline_checks.bench_report import size_text
from paceline_checks.preflight.spec import CHECKS, Check, PreflightReport, PreflightSpec, Status

Pair = tuple[int, int]
"""Two nodes, by number: the first one sends."""


@dataclass(kw_only=True)
class Results:
    """The collected facts, by node number.

    Attributes:
        nodes: number of nodes of the job, including those that never connected.
        facts: those of :func:`~paceline_checks.preflight.facts.collect` and ``choose_address``, with ``host``.
        absent: why a node is missing, or was lost.
        clock_s: how far a node's clock is ahead of node 0's.
        flows: streams over the interface that will be used, in bytes/s, or the error of the connection.
        all_reduce: its speed or its error; empty for one rank, or if it was not run for the reason in ``obstacle``.
    """

    spec: PreflightSpec
    nodes: int
    facts: dict[int, dict[str, Any]]
    absent: dict[int, str] = field(default_factory=dict)
    clock_s: dict[int, float] = field(default_factory=dict)
    flows: dict[Pair, float | str] = field(default_factory=dict)
    other_flows: dict[str, dict[Pair, float | str]] = field(default_factory=dict)
    storage: dict[int, dict[str, Any]] = field(default_factory=dict)
    all_reduce: dict[str, Any] = field(default_factory=dict)
    obstacle: str = ""

    def name(self, node: int) -> str:
        """Return a node's name, with its number if two nodes have the same name."""
        if node not in self.facts:
            return f"node {node}"
        host = str(self.facts[node]["host"])
        same = [other for other, own in self.facts.items() if own["host"] == host]
        return host if len(same) == 1 else f"{host} (node {node})"

    def link(self, pair: Pair) -> str:
        return " -> ".join(map(self.name, pair))

    def differing(self, values: Mapping[int, str]) -> str:
        """Return ``1.2 (3 nodes), 1.3 (b)``, the most frequent first."""
        parts = []
        for value, count in Counter(values.values()).most_common():
            names = [self.name(node) for node, other in values.items() if other == value]
            parts.append(f"{value} ({names[0] if count == 1 else f'{count} nodes'})")
        return ", ".join(parts)

    @property
    def faster_interface(self) -> str | None:
        """The interface over which all nodes reach each other much faster than over their own, if any."""
        speeds = {name: _slowest(flows) for name, flows in self.other_flows.items()}
        best = max(speeds, key=speeds.__getitem__, default=None)
        return best if best is not None and speeds[best] > _MIN_INTERFACE_RATIO * _slowest(self.flows) else None

    @property
    def chosen_interface(self) -> str | None:
        """The faster interface, if the following job will use it because it names none of its own."""
        return self.faster_interface if self.spec.before_job and self.spec.interface is None else None


def judge(results: Results) -> PreflightReport:
    """Run all checks, and merge those that are equal on several nodes; the most severe of a kind come first."""
    checks = [*_presence(results), *_software(results), *_network(results), *_all_reduce(results)]
    merged: dict[Check, list[str]] = {}
    for node in results.facts:
        for check in _node(results, node):
            merged.setdefault(check, []).append(results.name(node))
    for check, names in merged.items():
        is_everywhere = 1 < len(names) == len(results.facts)
        checks.append(replace(check, where="all" if is_everywhere else ", ".join(names)))
    order, severity = list(CHECKS), ("fail", "warn", "pass")
    checks.sort(key=lambda check: (order.index(check.id), severity.index(check.status)))
    machines = tuple(map(results.name, range(results.nodes)))
    return PreflightReport(machines=machines, checks=tuple(checks), interface=results.chosen_interface)


def all_reduce_obstacle(results: Results) -> str:
    """Return why an all-reduce cannot work; "" if no obstacle is known."""
    torches = [own["torch"] for own in results.facts.values()]
    versions = sorted({str(torch["version"]) for torch in torches})
    if len(versions) > 1:
        return f"torch differs: {', '.join(versions)}"
    if len({torch["gpus"] > 0 for torch in torches}) > 1:
        return "torch sees GPUs on some nodes only"
    if any(isinstance(flow, str) for flow in results.flows.values()):
        return "the nodes do not reach each other"
    return ""


# --- All nodes: presence, and whether their software is equal ---


_ONE_IMAGE = "Use one environment or image on all nodes (--python)"


def _presence(results: Results) -> Iterator[Check]:
    advice = "Check its output, that it was started, and that no firewall blocks it from node 0"
    for node, reason in results.absent.items():
        yield Check("machines", results.name(node), "fail", reason, advice)
    if not results.absent:
        yield Check("machines", "all", "pass", ", ".join(map(results.name, results.facts)))


def _software(results: Results) -> Iterator[Check]:
    pythons = {node: str(own["python"]) for node, own in results.facts.items()}
    is_minor = len({text.rpartition(".")[0] for text in pythons.values()}) > 1
    yield _compare(results, "python", pythons, "fail" if is_minor else "warn")
    torches = {node: str(own["torch"]["version"]) for node, own in results.facts.items()}
    yield _compare(results, "torch", torches, "fail")
    yield _libraries(results)
    kinds = {
        node: ", ".join(sorted({f"{gpu['name']}, driver {gpu['driver']}" for gpu in own["gpus"]}))
        for node, own in results.facts.items()
    }
    if len(set(kinds.values())) > 1:
        advice = "Bits differ between GPU models and drivers, and the slowest limits the speed: request one kind"
        yield Check("gpus", "all", "warn", results.differing(kinds), advice)


def _compare(results: Results, id: str, values: dict[int, str], status: Status) -> Check:
    if len(set(values.values())) > 1:
        return Check(id, "all", status, results.differing(values), _ONE_IMAGE)
    return Check(id, "all", "pass", next(iter(values.values())))


def _libraries(results: Results) -> Check:
    """Check the installed versions: Paceline's own dependencies must be equal; other differences are warnings."""
    installed = {node: own["libraries"] for node, own in results.facts.items()}
    names = sorted(set().union(*installed.values()))
    needed = {"paceline", *results.facts[min(installed)]["needed"]}
    # These communicate with their counterparts on other nodes, or come from torch's wheel.
    communicating = ("ray", "horovod", "tensorflow", "mpi4py", "deepspeed", "accelerate", "lightning", "nvidia-")
    errors, others = list[str](), list[str]()
    for name in names:
        versions = {node: libraries.get(name, "missing") for node, libraries in installed.items()}
        if len(set(versions.values())) > 1:
            is_error = name in needed or name.startswith(communicating)
            (errors if is_error else others).append(f"{name}: {results.differing(versions)}")
    shown = [*errors, *others]
    if not shown:
        found = f"{len(names)} distributions{' are equal' if len(installed) > 1 else ''}"
        return Check("libraries", "all", "pass", found)
    found = "; ".join(shown[:8]) + (f"; and {len(shown) - 8} more" if len(shown) > 8 else "")
    advice = f"{_ONE_IMAGE}; pip install --require-hashes from a lock file ensures this"
    return Check("libraries", "all", "fail" if errors else "warn", found, advice)


# --- Each node: task, GPUs, address, clock, disk, memory, files and cores. The report fills in its name ---


_MIB, _GIB = 1 << 20, 1 << 30
_BUSY_MIB = 1024
_CHECKPOINT_FACTOR = 3  # a checkpoint holds the weights and up to two optimizer moments of each
_SHM_MIN, _SHM_RECOMMENDED = 16 * _MIB, 64 * _MIB  # per process
_CLOCK_WARNS_S, _CLOCK_FAILS_S = 1.0, 10.0
_size = partial(size_text, digits=3)


def _node(results: Results, node: int) -> Iterator[Check]:
    own, spec, nproc = results.facts[node], results.spec, results.spec.processes_on(node)
    if (task := own["task"]) is not None and "error" in task:
        advice = "Make the task's file and its imports available on this node: install or share them"
        yield Check("task", "", "fail", task["error"], advice)
    elif task is not None:
        model = "" if task["model_bytes"] is None else f", a model of {task['model_bytes'] / _MIB:.1f} MiB"
        yield Check("task", "", "pass", f"{spec.task}{model}")
    yield _usable_gpus(results, node)
    if own["gpus"]:
        yield _gpu_health(own["gpus"])
    if results.nodes > 1:
        yield _host_name(results, node)
    if abs(ahead_s := results.clock_s.get(node, 0.0)) > _CLOCK_WARNS_S:
        found = f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} {results.name(0)}"
        advice = "Start its time service (chronyd or systemd-timesyncd): otherwise tokens expire early and logs mislead"
        yield Check("clock", "", "fail" if abs(ahead_s) > _CLOCK_FAILS_S else "warn", found, advice)
    if node in results.storage:
        yield from _run_directory(results, node)
        if results.storage[node]["free"] is not None:
            yield _disk_space(results, results.storage[node])
    free = own["shm_free"]
    if free is not None and free >= nproc * _SHM_RECOMMENDED:
        yield Check("shared-memory", "", "pass", f"at least {_size(nproc * _SHM_RECOMMENDED)} free")
    else:
        is_too_small = free is None or free < nproc * _SHM_MIN
        found = "/dev/shm does not exist" if free is None else f"{_size(free)} for {nproc} processes"
        advice = "Start the container with --shm-size=8g (in Kubernetes: an emptyDir with medium: Memory)"
        yield Check("shared-memory", "", "fail" if is_too_small else "warn", found, advice)
    soft, hard = own["open_files"], own["most_open_files"]
    # A gloo rank connects to all others, twice while a group changes.
    needed = 512 + 4 * sum(spec.processes_on(number) for number in range(results.nodes))
    if soft is None or soft >= needed:
        yield Check("open-files", "", "pass", "no limit" if soft is None else f"ulimit -n is {soft}")
    else:
        advice = f"The hard limit is {hard}: raise it in /etc/security/limits.conf, or with LimitNOFILE"
        if hard is None or hard >= needed:
            advice = "Run ulimit -n 65536 before the job starts"
        yield Check("open-files", "", "fail", f"ulimit -n is {soft}, but must be {needed}", advice)
    yield _cores(own, nproc, spec.threads or 1)


def _usable_gpus(results: Results, node: int) -> Check:
    own, requested, nproc = results.facts[node], results.spec.gpus_per_node, results.spec.processes_on(node)
    gpus, torch = own["gpus"], own["torch"]
    count, usable = len(gpus), int(torch["gpus"])
    models = f"{count} x {', '.join(sorted({gpu['name'] for gpu in gpus}))}"
    text = f", {requested} requested" if requested is not None else ""
    if own["gpu_error"]:
        advice = "Reload the driver or restart the node, or exclude it from the job"
        return Check("gpus", "", "fail", f"nvidia-smi: {own['gpu_error']}", advice)
    if count < (requested or 0):
        advice = "Request nodes with GPUs (--gpus-per-node), give the container access to them, or exclude this node"
        found = f"{count} {'GPU' if count == 1 else 'GPUs'}{text}"
        return Check("gpus", "", "fail", found, "Request fewer, or exclude this node" if count else advice)
    # CUDA_VISIBLE_DEVICES may leave some out on purpose.
    if usable < (min(count, own["visible_gpus"]) if requested is None else requested):
        built = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "its build has no CUDA"
        check = "Check CUDA_VISIBLE_DEVICES, and that the driver is new enough"
        advice = check if torch["cuda"] else "Install torch for CUDA"
        return Check("gpus", "", "fail", f"{models}, but torch sees {usable} ({built})", advice)
    if usable and nproc > usable:
        advice = f"Use --nproc {usable}: NCCL needs one process per GPU"
        return Check("gpus", "", "warn", f"{nproc} processes for {usable} GPUs", advice)
    return Check("gpus", "", "pass", f"{models}{text}" if count else "none")


def _gpu_health(gpus: list[dict[str, Any]]) -> Check:
    errors, warnings = list[str](), list[str]()
    for gpu in gpus:
        label = f"GPU {gpu['index']}"
        if gpu["uncorrected_errors"]:
            errors.append(f"{label} has {gpu['uncorrected_errors']} uncorrected memory errors")
        if gpu["slowed_by"]:
            warnings.append(f"{label} is slowed at {gpu['temperature_c']} °C ({', '.join(gpu['slowed_by'])})")
        if (gpu["used_mib"] or 0) > _BUSY_MIB:
            warnings.append(f"{label} has {gpu['used_mib']} MiB already in use")
    if not errors and not warnings:
        return Check("gpu-health", "", "pass", "no errors, no throttling")
    advice = "Check its cooling, power and other processes: nvidia-smi"
    if errors:
        advice = "Reset the GPU or restart the node; exclude it from the job if the error comes back"
    return Check("gpu-health", "", "fail" if errors else "warn", "; ".join([*errors, *warnings]), advice)


def _host_name(results: Results, node: int) -> Check:
    """Check the address of the node's own name, which gloo announces unless an interface is given."""
    own, agents = results.facts[node], results.spec.agents
    interface = results.spec.interface or results.chosen_interface
    loopback = [address for address in own["named"] if address.startswith("127.")]
    if own["named"] and not loopback:
        return Check("host-name", "", "pass", "resolves to an address on the network")
    resolution = f"resolves to {', '.join(loopback)}" if loopback else "does not resolve"
    found = f"its own name, {own['host']}, {resolution}"
    if interface is not None:
        return Check("host-name", "", "pass", f"{found}; the job uses the address of {interface}")
    advice = (
        f"Map {own['host']} to {own['address']} in its /etc/hosts; until then, use --interface {own['interface']}, "
        f"which keeps gloo from announcing the loopback address"
    )
    by_agents = ", as Paceline's agents do without --recover none" if agents else ""
    return Check("host-name", "", "fail" if loopback and not agents else "warn", found, f"{advice}{by_agents}")


def _run_directory(results: Results, node: int) -> Iterator[Check]:
    storage = results.storage[node]
    others = [other for other, own in results.storage.items() if other != node and own["error"] is None]
    unseen = [other for other in others if other not in storage["seen"]]
    lacks = [*map(Lack._make, storage["lacks"]), *([NODE_LOCKS] if storage["unlocked"] else [])]
    path = storage["path"]
    if storage["error"] is not None:
        advice = "Choose another with --run-dir, or repair the disk or its permissions"
        yield Check("run-directory", "", "fail", f"{path} cannot be written: {storage['error']}", advice)
    elif unseen and (node != 0 or len(unseen) == len(others)):
        found = f"{path} is not the directory of {', '.join(map(results.name, unseen))}"
        advice = "Choose a directory that all nodes share (NFS, Lustre) with --run-dir, and mount it on each of them"
        yield Check("run-directory", "", "fail", found, advice)
    elif not lacks:
        yield Check("run-directory", "", "pass", f"{path} is {'shared and ' if results.nodes > 1 else ''}writable")
    for lack in lacks:
        yield Check("run-directory", "", "warn", f"{path} {lack.found}", lack.advice)


def _disk_space(results: Results, storage: Mapping[str, Any]) -> Check:
    free, keep, about = storage["free"], results.spec.keep, ""
    size = results.spec.checkpoint_bytes or max(storage["checkpoints"], default=None)
    models = [own["task"].get("model_bytes") for own in results.facts.values() if own["task"]]
    if size is None and models and models[0] is not None:
        size, about = _CHECKPOINT_FACTOR * models[0], "about "
    # A new checkpoint is written before the oldest is removed; existing ones need no more space.
    existing = min(len(storage["checkpoints"]), keep)
    needed = _GIB if size is None else (keep + 1 - existing) * size
    wanted = "a checkpoint's size is unknown" if size is None else f"{keep} + 1 checkpoints of {about}{_size(size)}"
    kept = f", of which {existing} {'exists' if existing == 1 else 'exist'}" if existing else ""
    found = f"{storage['path']} has {_size(free)} free; {wanted}{kept}"
    if free >= needed:
        return Check("disk-space", "", "pass", found)
    if size is None:
        return Check("disk-space", "", "warn", found, "Give --checkpoint-size, or choose a larger disk with --run-dir")
    way = "free some space" if existing else "choose a larger disk with --run-dir, or reduce --keep-checkpoints"
    return Check("disk-space", "", "fail", found, f"{_size(needed)} are needed: {way}")


def _cores(own: Mapping[str, Any], nproc: int, threads: int) -> Check:
    usable = min(bound := len(set(own["cpus"])), own["core_quota"] or bound)
    found = f"{usable:g} of {own['cores']} cores for {nproc} x {threads} threads"
    if nproc * threads <= usable:
        return Check("cpus", "", "pass", found)
    advice = "Use fewer processes or --threads"
    if usable < own["cores"]:
        advice += ", or request more: with --cpus-per-task, or a larger quota of the container"
    return Check("cpus", "", "warn", found, advice)


# --- The network: addresses, connections, speed, an all-reduce ---


_MIN_RATE = 100e6 / 8  # 100 Mbit/s
_MIN_INTERFACE_RATIO = 3.0  # speed of another interface, to recommend it


def common_interfaces(facts: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[int, str]]:
    """Return the addresses of interfaces that all nodes have with different ones, which excludes container bridges."""
    addresses = {
        node: {each["name"]: str(each["address"]) for each in own["interfaces"]} for node, own in facts.items()
    }
    names = set.intersection(*map(set, addresses.values()))
    common = {name: {node: own[name] for node, own in addresses.items()} for name in sorted(names)}
    return {name: own for name, own in common.items() if len(set(own.values())) == len(facts)}


def known_rates(flows: Mapping[Pair, float | str]) -> dict[Pair, float]:
    """Return the measured bandwidths, in bytes/s."""
    return {pair: flow for pair, flow in flows.items() if not isinstance(flow, str)}


def slow_links(flows: Mapping[Pair, float | str]) -> list[tuple[float, Pair]]:
    """Return the bandwidths, in bytes/s, that are low absolutely or relative to the highest; the lowest first."""
    rates = known_rates(flows)
    return sorted((rate, pair) for pair, rate in rates.items() if rate < max(_MIN_RATE, 0.25 * max(rates.values())))


def _network(results: Results) -> Iterator[Check]:
    problems = [node for node, own in results.facts.items() if own["address_problem"]]
    for node in problems:
        own = results.facts[node]
        names = ", ".join(f"{each['name']} ({each['address']})" for each in own["interfaces"])
        advice = f"Give --interface one of: {names}" if names else "Leave out --interface"
        yield Check("interface", results.name(node), "fail", own["address_problem"].rstrip("."), advice)
    used = ", ".join(sorted({str(own["interface"]) for own in results.facts.values()}))
    if (best := results.faster_interface) is not None:
        speeds = _rate(_slowest(results.flows)), _rate(_slowest(results.other_flows[best]))
        found = f"{used} would be used, at {speeds[0]}; {best} has {speeds[1]}"
        yield Check("interface", "all", "warn", found, f"Give --interface {best}")
    elif not problems and (results.nodes > 1 or results.spec.interface is not None):
        yield Check("interface", "all", "pass", used)
    if not results.flows:
        return
    for pair, flow in results.flows.items():
        if isinstance(flow, str):
            advice = "Open TCP ports 1024-65535 between the nodes of a job, or choose another network with --interface"
            found = f"a port that the kernel chose at {results.facts[pair[1]]['address']}: {flow}"
            yield Check("ports", results.link(pair), "fail", found, advice)
    if len(known_rates(results.flows)) == len(results.flows):
        found = "the nodes reach node 0's store, and each other on ports of the kernel's choice"
        yield Check("ports", "all", "pass", found)
    worst = max(abs(ahead_s) for ahead_s in results.clock_s.values())
    if worst <= _CLOCK_WARNS_S:
        yield Check("clock", "all", "pass", f"within {worst * 1e3:.0f} ms")
    interface = results.chosen_interface
    flows = results.flows if interface is None else results.other_flows[interface]
    rates = sorted(known_rates(flows).values())
    slow = slow_links(flows)
    for rate, pair in slow:
        found = f"{_rate(rate)}; the fastest link has {_rate(rates[-1])}"
        advice = "Check the cable, the switch port, its negotiated speed (ethtool) and other traffic"
        is_very_slow = rate < max(_MIN_RATE, 0.1 * rates[-1])
        yield Check("bandwidth", results.link(pair), "fail" if is_very_slow else "warn", found, advice)
    if rates and not slow:
        found = f"{_rate(rates[0])} to {_rate(rates[-1])}, median {_rate(statistics.median(rates))}, one TCP stream"
        yield Check("bandwidth", "all", "pass", found)


def _all_reduce(results: Results) -> Iterator[Check]:
    outcome = results.all_reduce
    if results.absent or results.obstacle:
        found = f"not run: {results.obstacle or 'some ranks are missing'}"
        yield Check("all-reduce", "all", "warn", found, "Correct the problems above first")
    elif not outcome:
        yield Check("all-reduce", "all", "pass", "not run: there is only one rank")
    elif "error" in outcome:
        advice = "Run the job with --comm-debug, which logs what gloo and NCCL do"
        yield Check("all-reduce", "all", "fail", outcome["error"], advice)
    else:
        speed = f"{outcome['bytes'] >> 10} KiB in {outcome['ms']:.1f} ms: {_rate(outcome['bytes_per_s'])} bus bandwidth"
        yield Check("all-reduce", "all", "pass", f"{outcome['backend']}, {outcome['ranks']} ranks, {speed}")


def _slowest(flows: Mapping[Pair, float | str]) -> float:
    """Return the speed of a ring over these links; 0 if one of them does not work."""
    rates = known_rates(flows)
    return min(rates.values()) if len(rates) == len(flows) > 0 else 0.0


def _rate(bytes_per_s: float) -> str:
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.1f} Mbit/s"
