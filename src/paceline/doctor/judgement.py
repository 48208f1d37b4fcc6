"""From findings to checks: pure functions, one for each kind of thing that can be wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from paceline.doctor.checks import Check
from paceline.doctor.findings import Findings
from paceline.doctor.judge_gpus import judge_gpus
from paceline.doctor.judge_machine import judge_machine
from paceline.doctor.judge_network import judge_network


def judge(findings: Findings) -> list[Check]:
    """All checks, passed ones too: one for each machine, or one for all where they are compared."""
    return [
        *_machines(findings),
        *_software(findings),
        *judge_gpus(findings),
        *judge_network(findings),
        *judge_machine(findings),
    ]


def _machines(findings: Findings) -> Iterable[Check]:
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


def _software(findings: Findings) -> Iterable[Check]:
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


def _libraries(findings: Findings) -> Check:
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
        found = (
            f"{len(names)} distributions are equal"
            if len(findings.facts) > 1
            else f"{len(names)} distributions"
        )
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


def _imports(findings: Findings, name: str) -> Iterable[Check]:
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


def _where(nodes: list[int], findings: Findings) -> str:
    return "all" if len(nodes) == len(findings.facts) else ", ".join(map(findings.name, nodes))


def _differing(values: Mapping[int, str], name: Callable[[int], str]) -> str:
    """``1.2 (3 machines), 1.3 (b)``: the most frequent first."""
    parts = []
    for value, count in Counter(values.values()).most_common():
        who = [name(node) for node, each in values.items() if each == value]
        parts.append(f"{value} ({who[0] if count == 1 else f'{count} machines'})")
    return ", ".join(parts)
