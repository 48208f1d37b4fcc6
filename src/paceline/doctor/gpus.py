"""What NVIDIA's tools say about the GPUs of this machine. No torch.

The fields and their words are those of ``nvidia-smi --help-query-gpu``; the bits of the clocks' reasons are
NVML's ``nvmlClocksEventReason*``; Xid errors are listed in NVIDIA's "XID Errors" document.
"""

from __future__ import annotations

import re
import subprocess
from typing import TypedDict

_FIELDS = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.active",
)
_SLOWED = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_TIME_LIMIT_S = 60


class Gpu(TypedDict):
    """One GPU; None for what it does not report."""

    index: int
    name: str
    driver: str
    memory_mib: int | None
    used_mib: int | None
    temperature_c: int | None
    uncorrected_errors: int | None
    slowed_by: list[str]


class GpuFacts(TypedDict):
    """All GPUs of a machine.

    ``error`` says why nvidia-smi could not be asked, where there is one. ``cuda`` is the newest CUDA that the
    driver runs. ``links`` says how two GPUs reach each other: ``{"0-1": "NV18"}``. ``xids`` are the GPUs'
    errors in the kernel's log, None where it cannot be read.
    """

    gpus: list[Gpu]
    error: str | None
    cuda: str | None
    links: dict[str, str]
    xids: list[str] | None


def gpu_facts() -> GpuFacts:
    """Ask nvidia-smi, where there is one."""
    facts = GpuFacts(gpus=[], error=None, cuda=None, links={}, xids=None)
    try:
        table = _run("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    except FileNotFoundError:
        return facts
    except (OSError, subprocess.SubprocessError) as error:
        facts["error"] = _words(error)
        return facts
    facts["gpus"] = parse_gpus(table)
    for name, command in (
        ("cuda", ("nvidia-smi",)),
        ("links", ("nvidia-smi", "topo", "-m")),
        ("xids", ("dmesg",)),
    ):
        try:
            text = _run(*command)
        except (OSError, subprocess.SubprocessError):
            continue
        if name == "cuda":
            match = re.search(r"CUDA Version:\s*([\d.]+)", text)
            facts["cuda"] = match[1] if match else None
        elif name == "links":
            facts["links"] = parse_links(text)
        else:
            facts["xids"] = parse_xids(text)
    return facts


def parse_gpus(table: str) -> list[Gpu]:
    """The lines of ``nvidia-smi --query-gpu=... --format=csv,noheader,nounits``."""
    gpus = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_FIELDS):
            continue
        reasons = int(cells[7], 16) if cells[7].startswith("0x") else 0
        gpus.append(
            Gpu(
                index=int(cells[0]),
                name=cells[1],
                driver=cells[2],
                memory_mib=_number(cells[3]),
                used_mib=_number(cells[4]),
                temperature_c=_number(cells[5]),
                uncorrected_errors=_number(cells[6]),
                slowed_by=[name for bit, name in _SLOWED.items() if reasons & bit],
            )
        )
    return gpus


def parse_links(matrix: str) -> dict[str, str]:
    """The pairs of GPUs in ``nvidia-smi topo -m``: ``{"0-1": "NV18", "0-2": "SYS"}``."""
    links = {}
    # The header may be underlined, with escape codes of the terminal.
    lines = [line.split() for line in re.sub(r"\x1b\[\d*m", "", matrix).splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"] and words[1:2] != ["X"]), [])
    columns = [word for word in header if re.fullmatch(r"GPU\d+", word)]
    for words in lines:
        if words[:1] and words[0] in columns and words is not header:
            for column, link in zip(columns, words[1:], strict=False):
                first, second = int(words[0][3:]), int(column[3:])
                if first < second:
                    links[f"{first}-{second}"] = link
    return links


def parse_xids(log: str) -> list[str]:
    """The GPUs' errors in the kernel's log: ``Xid 79 (PCI:0000:3b:00): GPU has fallen off the bus.``"""
    found = re.findall(r"NVRM: Xid \((PCI:[\w:.]+)\): (\d+), *(.*)", log)
    return [f"Xid {number} ({device}): {text}"[:200] for device, number, text in found]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=True)
    return done.stdout


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _words(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stdout + error.stderr).strip().partition("\n")[0] or f"exit code {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer within {_TIME_LIMIT_S} s"
    return str(error)
