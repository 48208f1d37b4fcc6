"""Whether the GPUs are there, healthy, and alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.doctor.checks import Check
from paceline.doctor.findings import Findings

_DIRECT = ("NV", "PIX", "PXB")
_BUSY_MIB = 1024


def judge_gpus(findings: Findings) -> Iterable[Check]:
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


def _usable(findings: Findings, node: int) -> Check:
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
    return Check(
        id="gpus", where=name, status="pass", found=f"{count} x {models}{wanted}" if count else "none"
    )


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
    log = (
        "" if facts["xids"] is not None else "; the kernel's log cannot be read, so Xid errors are not known"
    )
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


def _alike(findings: Findings) -> Iterable[Check]:
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
