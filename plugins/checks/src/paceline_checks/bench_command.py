"""``paceline bench``: measurements of the user's own machines."""

from __future__ import annotations

from cyclopts import App

app = App(name="bench", help="Measure collectives on your machines.")
app.command(
    "paceline_checks.bench_comm_command:comm", name="comm", help="How fast collectives are, and whether they are right."
)
