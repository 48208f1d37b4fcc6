"""Draw the data flow of each strategy as SVG: the parts that each process holds, and the messages between them.

``python scripts/strategy_diagrams.py`` writes them to docs/images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

_BOX_W, _BOX_H, _GAP, _TOP, _LEFT = 150, 74, 70, 46, 20
_FILL = "#e8eef4"
_PART = "#4f7ca8"


@dataclass(frozen=True)
class Rank:
    """A process: its name, what data it sees, and which part of the model it holds, from 0 to 1."""

    name: str
    data: str
    held: tuple[float, float] = (0.0, 1.0)
    rows: bool = False


@dataclass(frozen=True)
class Diagram:
    """Ranks side by side, and what goes between neighbours."""

    title: str
    ranks: Sequence[Rank]
    between: str
    below: str


def _halves(first: str, second: str) -> tuple[Rank, Rank]:
    """Two processes with a half of everything each, and what data they see."""
    return Rank("rank 0", first, (0.0, 0.5), rows=True), Rank("rank 1", second, (0.5, 1.0), rows=True)


DIAGRAMS = {
    "ddp": Diagram(
        "ddp: each process has the whole model",
        (Rank("rank 0", "micro-batches 0, 1"), Rank("rank 1", "micro-batches 2, 3")),
        "gradients",
        "once a step, while backward runs",
    ),
    "zero1": Diagram(
        "zero1: each process has the whole model, and updates a part of it",
        (Rank("rank 0", "micro-batches 0, 1"), Rank("rank 1", "micro-batches 2, 3")),
        "gradients; parameters",
        "optimizer state of a part each",
    ),
    "fsdp": Diagram(
        "fsdp: each process has a part of every block",
        _halves("micro-batches 0, 2", "micro-batches 1, 3"),
        "blocks; gradients",
        "a block is gathered for its forward and again for its backward",
    ),
    "deepspeed": Diagram(
        "deepspeed, stage 3: each process has a part of every parameter",
        _halves("micro-batches 0, 1", "micro-batches 2, 3"),
        "modules; gradients",
        "stages 1 and 2: as zero1; from 2 on, each process keeps a part of the gradients",
    ),
    "tp": Diagram(
        "tp: each process has a part of every layer, and all see the same data",
        _halves("micro-batches 0 to 3", "micro-batches 0 to 3"),
        "activations",
        "added up in every block, forward and backward",
    ),
    "pp": Diagram(
        "pp: each process has some blocks, and micro-batches go through all of them",
        (Rank("stage 0", "micro-batches 0 to 3 in", (0.0, 0.5)), Rank("stage 1", "losses out", (0.5, 1.0))),
        "activations; gradients",
        "one micro-batch after the other",
    ),
    "sequential": Diagram(
        "sequential: each process has some blocks, and one micro-batch at a time goes through all",
        (
            Rank("stage 0", "micro-batch 1 in", (0.0, 0.5)),
            Rank("stage 1", "loss of micro-batch 1 out", (0.5, 1.0)),
        ),
        "activations; gradients",
        "all stages but one wait",
    ),
    "pipedream": Diagram(
        "pipedream: stages that never wait for a step's end",
        (
            Rank("stage 0", "weights of 2 steps", (0.0, 0.5)),
            Rank("stage 1", "weights of 1 step", (0.5, 1.0)),
        ),
        "activations; gradients",
        "a micro-batch's backward sees the weights of its forward",
    ),
    "ps": Diagram(
        "ps: servers have the parameters, workers compute gradients",
        (Rank("server", "no data"), Rank("worker 0", "steps 0, 2", (0.0, 1.0))),
        "parameters; gradients",
        "each worker by itself",
    ),
    "hogwild": Diagram(
        "hogwild: one model in shared memory, and no locks",
        (
            Rank("rank 0", "steps 0, 2, 3", (0.0, 0.0)),
            Rank("shared memory", "no data"),
            Rank("rank 1", "steps 1, 4", (0.0, 0.0)),
        ),
        "parameters; gradients",
        "each process by itself",
    ),
    "dp": Diagram(
        "dp: one process, which copies the model to each device in every step",
        (Rank("device 0", "micro-batches 0, 1"), Rank("device 1", "micro-batches 2, 3")),
        "parameters; gradients",
        "gradients are gathered on the first device, which steps",
    ),
    "local-sgd": Diagram(
        "--local-sgd-steps N: processes train independently, and average their states",
        (Rank("rank 0", "micro-batches 0, 1"), Rank("rank 1", "micro-batches 2, 3")),
        "parameters",
        "every N steps",
    ),
}


def draw(diagram: Diagram) -> str:
    """The diagram as SVG."""
    count = len(diagram.ranks)
    gap = _GAP + 8 * max(0, len(diagram.between) - 8)
    width = max(2 * _LEFT + count * _BOX_W + (count - 1) * gap, 2 * _LEFT + 7 * len(diagram.title))
    start = (width - count * _BOX_W - (count - 1) * gap) / 2
    height = _TOP + _BOX_H + 62
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{width / 2:.0f}" y="20" font-size="14" text-anchor="middle">{escape(diagram.title)}</text>',
    ]
    middle = _TOP + _BOX_H / 2
    for number, rank in enumerate(diagram.ranks):
        x = start + number * (_BOX_W + gap)
        parts.append(f'<rect x="{x:.0f}" y="{_TOP}" width="{_BOX_W}" height="{_BOX_H}" fill="{_FILL}" stroke="#888"/>')
        low, high = rank.held
        for block in range(4):
            left = x + 14 + block * 32
            there = low <= block / 4 < high
            top, tall = (_TOP + 26 + 40 * low, 40 * (high - low)) if rank.rows else (_TOP + 26, 40)
            parts.append(f'<rect x="{left:.0f}" y="{_TOP + 26}" width="26" height="40" fill="white" stroke="{_PART}"/>')
            if rank.rows or there:
                parts.append(f'<rect x="{left:.0f}" y="{top:.0f}" width="26" height="{tall:.0f}" fill="{_PART}"/>')
        centre = x + _BOX_W / 2
        parts.append(f'<text x="{centre:.0f}" y="{_TOP + 17}" text-anchor="middle">{escape(rank.name)}</text>')
        parts.append(f'<text x="{centre:.0f}" y="{_TOP + _BOX_H + 18}" text-anchor="middle">{escape(rank.data)}</text>')
        if number:
            parts += [
                f'<line x1="{x - gap + 6:.0f}" x2="{x - 6:.0f}" y1="{middle}" y2="{middle}" stroke="#c33" '
                'stroke-width="2"/>',
                f'<path d="M{x - 6:.0f} {middle} l-8 -4 v8 z" fill="#c33"/>',
                f'<path d="M{x - gap + 6:.0f} {middle} l8 -4 v8 z" fill="#c33"/>',
                f'<text x="{x - gap / 2:.0f}" y="{middle - 9}" text-anchor="middle">{escape(diagram.between)}</text>',
            ]
    parts.append(
        f'<text x="{width / 2:.0f}" y="{height - 12}" text-anchor="middle" fill="#555">{escape(diagram.below)}</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


def write(directory: Path) -> None:
    """Draw all of them."""
    for name, diagram in DIAGRAMS.items():
        (directory / f"strategy-{name}.svg").write_text(draw(diagram), encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).parents[1] / "docs" / "images")
