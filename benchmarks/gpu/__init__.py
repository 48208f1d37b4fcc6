"""Paceline proven and measured on a GPU: ``python -m benchmarks.gpu test`` and ``bench``."""
