"""From a run to a package: the trained model read, written in several formats, and each compared with it.

``source`` reads the run, ``quantization`` makes weights smaller, ``programs`` writes what runs without the
task's code, ``comparison`` holds each against the trained model, ``package_writer`` puts all into the
registry, ``card`` tells people of it, ``loading`` is the way back from a package to a function.
"""
