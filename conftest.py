"""The plugins that every run of the tests uses."""

pytest_plugins = [
    "tests.plugins.golden",
    "tests.plugins.ci_skips",
    "tests.plugins.gpu",
    "tests.plugins.layers",
    "tests.processes",
    "tests.gpu_stand_in.fixture",
]
