"""``paceline bench``: measurements of the user's own machines."""

from __future__ import annotations

from cyclopts import App

app = App(name="bench", help="Measure collectives, and how a task scales, on your machines.")
app.command("paceline.cli.bench_comm:comm", name="comm", help="How fast collectives are, and whether they are right.")
app.command(
    "paceline.cli.bench_scaling:scaling",
    name="scaling",
    help="Measure throughput and efficiency by number of processes.",
    # cyclopts would inspect all options once more to find it out.
    usage="Usage: paceline bench scaling [OPTIONS] TASK",
)
