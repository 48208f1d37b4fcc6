"""Paceline compared with hand-written loops and other libraries: ``python -m benchmarks SUITE``."""
