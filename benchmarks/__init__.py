"""Paceline measured beside hand-written loops and other libraries: ``python -m benchmarks SUITE``."""
