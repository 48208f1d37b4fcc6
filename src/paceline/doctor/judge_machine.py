"""Whether each machine has the disk, memory, files and cores that the job needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from paceline.doctor.checks import Check, Status
from paceline.doctor.findings import Findings

_GIB = 1 << 30
_MIB = 1 << 20
_STATE = 3  # a checkpoint holds the weights, and up to two moments of each in the optimizer
_SHM_LEAST, _SHM_GOOD = 16 * _MIB, 64 * _MIB  # a process
_RDMA_LOCKS = _GIB


def judge_machine(findings: Findings) -> Iterable[Check]:
    """All checks of single machines: one for all where it passes everywhere."""
    yield from _run_directory(findings)
    for judged in (_disk_space, _shared_memory, _open_files, _locked_memory, _cpus):
        yield from _each(findings, judged)


def _each(findings: Findings, judged: Callable[[Findings, int], Check | None]) -> Iterable[Check]:
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


def _run_directory(findings: Findings) -> Iterable[Check]:
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
                advice="Choose another with --run, or mend the disk or its permissions",
            )
        if unseen and (node != 0 or len(unseen) == len(others)):
            well = False
            yield Check(
                id="run-directory",
                where=name,
                status="fail",
                found=f"{path} is not the directory of {', '.join(map(findings.name, unseen))}",
                advice="Choose a directory that all machines share (NFS, Lustre) with --run, and mount it on "
                "each of them",
            )
        if not storage["hard_links"]:
            well = False
            yield Check(
                id="run-directory",
                where=name,
                status="warn",
                found=f"{path} takes no hard links",
                advice="Where machines lose each other, exactly half of them cannot go on: the lease is a "
                "hard link",
            )
    if well and findings.storage:
        shared = "shared and writable" if len(findings.storage) > 1 else "writable"
        yield Check(
            id="run-directory", where="all", status="pass", found=f"{findings.storage[0]['path']} is {shared}"
        )


def _disk_space(findings: Findings, node: int) -> Check | None:
    storage = findings.storage.get(node)
    if storage is None or storage["free"] is None:
        return None
    free, keep = storage["free"], findings.examination.keep
    size, how = _checkpoint_bytes(findings)
    # One is written before the oldest is removed; those that are there take no more room.
    there = min(len(storage["checkpoints"]), keep)
    needed = (keep + 1 - there) * size if size is not None else _GIB
    what = (
        "a checkpoint's size is not known"
        if size is None
        else f"{keep} + 1 checkpoints of {how}{_size(size)}"
    )
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
        else "Give --checkpoint-size, or a larger disk with --run"
        if size is None
        else f"{_size(needed)} are needed: "
        f"{'make room there' if there else 'choose a larger disk with --run, or fewer with --keep'}",
    )


def _checkpoint_bytes(findings: Findings) -> tuple[int | None, str]:
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


def _shared_memory(findings: Findings, node: int) -> Check:
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
    return Check(
        id="shared-memory", where=name, status="pass", found=f"at least {_size(nproc * _SHM_GOOD)} free"
    )


def _open_files(findings: Findings, node: int) -> Check:
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


def _locked_memory(findings: Findings, node: int) -> Check | None:
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


def _cpus(findings: Findings, node: int) -> Check:
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
