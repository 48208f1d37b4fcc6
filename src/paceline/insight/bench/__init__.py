"""Benchmarks: the same work by a hand-written loop, by peers and by Paceline, in alternating rounds."""
