"""Plug-ins: the page's own, installed beside Paceline; and what is said of those that cannot be used."""

from __future__ import annotations

import csv
import json
import sys
import tomllib
import typing
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from tests.docs.test_code_blocks import ROOT, code_blocks
from tests.processes import Processes

from paceline.core import plugins
from paceline.core.built_in import BUILT_IN, TRAITS
from paceline.core.config import RunConfig
from paceline.core.errors import ConfigError, TaskError
from paceline.core.option_groups import STRATEGIES, find_traits
from paceline.core.plugins import all_names, find_plugins, import_object
from paceline.core.task_loading import check_spec, load_task_class
from paceline.launch.launcher import get_launcher
from paceline.runs.trackers import load_tracker

EntryPoints = Mapping[str, Mapping[str, str]]
Install = Callable[..., None]


def write_distribution(directory: Path, name: str, entry_points: EntryPoints, modules: Mapping[str, str]) -> None:
    """What an installer writes of a distribution."""
    metadata = directory / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    sections = [
        f"[{group}]\n" + "".join(f"{each} = {place}\n" for each, place in names.items())
        for group, names in entry_points.items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(sections))
    for file, text in modules.items():
        (directory / file).write_text(text)


# --- The page's distribution ---


@pytest.fixture(scope="module")
def extras(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which processes find the page's distribution."""
    directory = tmp_path_factory.mktemp("extras")
    blocks = code_blocks((ROOT / "docs" / "plugins.md").read_text(encoding="utf-8"))
    [project] = [tomllib.loads(block.text)["project"] for block in blocks if block.language == "toml"]
    modules = {block.title: block.text for block in blocks if block.title is not None}
    write_distribution(directory, project["name"], project["entry-points"], modules)
    return {"PYTHONPATH": str(directory), "OMP_NUM_THREADS": "1"}


@pytest.mark.cold
def test_the_plugins_of_the_page_train_on_two_processes(
    run_processes: Processes, tmp_path: Path, extras: dict[str, str]
) -> None:
    done = run_processes.paceline(
        *("train", "line", "--strategy", "bf16-allreduce", "--on", "wrapped", "--wrapper", "nice -n 1"),
        *(
            "--log-to",
            "csv",
            "--nproc",
            "2",
            "--epochs",
            "3",
            "--log-every",
            "1",
            "--run-dir",
            "run",
            "--device",
            "cpu",
        ),
        env=extras,
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    result = json.loads((run / "result.json").read_text())
    assert (result["strategy"], result["world_size"]) == ("bf16-allreduce", 2)
    assert result["samples"] == 3 * 96
    with (run / "values.csv").open(newline="") as file:
        losses = [float(row["value"]) for row in csv.DictReader(file) if row["name"] == "train/loss"]
    assert len(losses) == result["steps"]
    assert losses[-1] < losses[0] / 2


@pytest.mark.cold
def test_a_launcher_is_rendered_with_its_own_options(
    run_processes: Processes, tmp_path: Path, extras: dict[str, str]
) -> None:
    line = ("train", "line", "--on", "wrapped", "--nproc", "2", "--run-dir", "run")
    done = run_processes.paceline(*line, "--wrapper", "nice -n 7", "--dry-run", env=extras)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# 2 ranks under nice -n 7\nnice -n 7 ")
    assert "-P -m paceline.launch.node --rank-launcher agent --nproc 2 -- " in done.stdout
    assert not (tmp_path / "run").exists()
    refused = run_processes.paceline(*line, "--partition", "gpu", env=extras)
    assert refused.returncode == 2
    assert "--partition is not supported by --on wrapped" in refused.stderr
    assert "--on wrapped takes: --wrapper." in refused.stderr
    everything = run_processes.paceline("train", "--on", "wrapped", "--help-all", env=extras).stdout
    assert "--on wrapped" in everything
    assert "--wrapper" in everything
    several = run_processes.paceline(*line, "--nodes", "2", "--dry-run", env=extras)
    assert several.returncode == 2
    assert several.stderr.endswith("--on wrapped is for one machine. Leave --nodes out.\n")


@pytest.mark.cold
def test_a_script_is_launched(run_processes: Processes, tmp_path: Path, extras: dict[str, str]) -> None:
    (tmp_path / "rank.py").write_text("import os\nprint('rank', os.environ['RANK'], os.nice(0))\n")
    started = ("launch", "--on", "wrapped", "--wrapper", "nice -n 1", "--nproc", "2", "--rank-launcher", "spawn")
    done = run_processes.paceline(*started, "--", "rank.py", env=extras)
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[1] for line in done.stdout.splitlines()) == ["0", "1"]


@pytest.mark.cold
def test_the_version_lists_plugins_and_whose_they_are(run_processes: Processes, extras: dict[str, str]) -> None:
    done = run_processes.paceline("version", env=extras)
    assert "plug-in: strategy 'bf16-allreduce' (extras_strategy:BF16AllReduce) of paceline-extras 1.0\n" in done.stdout
    listed = json.loads(run_processes.paceline("version", "--json", env=extras).stdout)["plugins"]
    assert [each["name"] for each in listed] == ["wrapped", "bf16-allreduce", "line", "csv"]


HELP = """
import contextlib, io, sys
from paceline.cli import main
sys.argv = ["paceline", "train", *sys.argv[1:]]
with contextlib.redirect_stdout(io.StringIO()):
    assert main() == 0
assert "importlib.metadata" not in sys.modules
"""


@pytest.mark.cold
@pytest.mark.parametrize("words", [["--help"], ["--on", "slurm", "--strategy", "fsdp", "--help"]], ids=" ".join)
def test_names_of_our_own_read_no_metadata(run_processes: Processes, extras: dict[str, str], words: list[str]) -> None:
    done = run_processes.run([sys.executable, "-c", HELP, *words], env=extras)
    assert done.returncode == 0, done.stderr


# --- Names in this process ---


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> typing.Iterator[Install]:
    """Install a distribution for this test."""
    before = set(sys.modules)

    def install(name: str, entry_points: EntryPoints, **modules: str) -> None:
        directory = tmp_path / name
        write_distribution(directory, name, entry_points, {f"{file}.py": text for file, text in modules.items()})
        monkeypatch.syspath_prepend(str(directory))
        find_plugins.cache_clear()

    yield install
    find_plugins.cache_clear()
    for module in set(sys.modules) - before:
        if module.startswith("plugin_"):
            del sys.modules[module]


STRATEGY = """
from paceline.core.option_groups import Traits
from paceline.parallel.strategy import DDP

class Mine(DDP):
    traits = Traits({})
"""


def test_what_does_not_go_with_a_strategy_is_refused_as_for_ours(install: Install) -> None:
    declared = 'reductions=("exact",), own_reduction="mine", supports=frozenset({"compile"})'
    install("mine", {"paceline.strategies": {"mine": "plugin_mine:Mine"}}, plugin_mine=STRATEGY.format(declared))
    config = RunConfig(strategy=plugins.StrategyPlugin("mine"))
    assert (config.strategies, config.reducer) == (("mine",), "mine")
    assert config.non_elastic_options == ("--strategy mine",)
    assert not config.parallel.shards_state
    assert config.parallel.axes(3) == {"dp": 3}
    refused: dict[str, tuple[typing.Any, str]] = {
        "reduction": ("allreduce", "--reduction allreduce does not work with --strategy mine, which sums gradients"),
        "ema": (0.9, "--ema does not work with --strategy mine. Use --strategy ddp."),
        "profile": (3, "--profile does not work with --strategy mine. Use --strategy ddp."),
        "fsdp_wrap": ("Block", "--fsdp-wrap needs --strategy fsdp"),
        "local_sgd_steps": (5, "--local-sgd-steps 5 works with --strategy ddp only, not with mine."),
        "mesh": ("dp=2", "--mesh dp=2 uses ddp, not --strategy mine."),
    }
    for name, (value, message) in refused.items():
        with pytest.raises(ConfigError) as error:
            RunConfig(strategy=plugins.StrategyPlugin("mine"), **{name: value})
        assert str(error.value).startswith(message), name


def test_a_strategy_declares_what_it_shards_and_who_may_leave(install: Install) -> None:
    text = STRATEGY.format("shards_state=True, elastic=True")
    install("mine", {"paceline.strategies": {"mine": "plugin_mine:Mine"}}, plugin_mine=text)
    config = RunConfig(strategy=plugins.StrategyPlugin("mine"), reduction="allreduce", ema=0.9)
    assert config.parallel.shards_state
    assert config.non_elastic_options == ()
    assert config.reducer == "allreduce"


def test_errors_list_the_names_of_plugins(install: Install) -> None:
    names = {group: {f"my-{group[9:]}": "plugin_none:Nothing"} for group in BUILT_IN}
    install("mine", names)
    for option, name in (("on", "my-launchers"), ("strategy", "my-strategies")):
        with pytest.raises(ConfigError, match=rf"^--{option} must be auto, .* or {name}, but is 'nothing'\.$"):
            RunConfig(**{option: "nothing"})
    with pytest.raises(ConfigError, match=r"^--log-to must be mlflow or wandb or my-trackers, but is 'nothing'\."):
        RunConfig(log_to=("nothing",))
    with pytest.raises(TaskError, match=r"one of the built-in tasks: fashion-mnist, .*, my-tasks\.$"):
        check_spec("nothing")
    with pytest.raises(ConfigError, match=r"^there is no launcher 'nothing'\. Choose one of: .*, my-launchers\.$"):
        get_launcher("nothing")
    # A name that could be meant is none of another kind.
    with pytest.raises(ConfigError, match="but is 'my-launchers'"):
        RunConfig(strategy=plugins.StrategyPlugin("my-launchers"))


USES: dict[str, Callable[[str], object]] = {
    "paceline.launchers": get_launcher,
    "paceline.strategies": find_traits,
    "paceline.trackers": load_tracker,
    "paceline.tasks": load_task_class,
}
"""What is called when a name is used."""


@pytest.mark.parametrize("group", BUILT_IN)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be imported: ModuleNotFoundError: No module named 'plugin_broken'"),
        ("import plugin_missing", "cannot be imported: ModuleNotFoundError: No module named 'plugin_missing'"),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
        ("Other = 1", "cannot be imported: AttributeError: module 'plugin_broken' has no attribute 'Class'"),
        ("class Class: pass", "must be a "),
        ("def Class(): pass", "must be a "),
    ],
)
def test_a_plugin_that_cannot_be_used_is_named_with_its_distribution(
    install: Install, group: str, text: str | None, reason: str
) -> None:
    install(
        "broken-things",
        {group: {"broken": "plugin_broken:Class"}},
        **({} if text is None else {"plugin_broken": text}),
    )
    with pytest.raises(ConfigError) as error:
        USES[group]("broken")
    whose = "'broken' (plugin_broken:Class) of broken-things 1.0"
    assert f"{whose} {reason}" in str(error.value)
    assert str(error.value).endswith("Repair or uninstall it.")
    # What does not use it works as before.
    USES[group](next(name for name in BUILT_IN[group] if name != "mlflow"))  # type: ignore[index]


def test_a_launcher_bears_its_name_and_declares_its_options(install: Install) -> None:
    text = "from paceline.launch.local import Spawn\nclass Renamed(Spawn): pass\n"
    text += "class Untyped(Spawn):\n    name = 'untyped'\n    options_type = int\n"
    places = {"renamed": "plugin_launchers:Renamed", "untyped": "plugin_launchers:Untyped"}
    install("mine", {"paceline.launchers": places}, plugin_launchers=text)
    with pytest.raises(ConfigError, match=r"of mine 1\.0 must be a subclass of .* whose `name` is 'renamed'"):
        get_launcher("renamed")
    with pytest.raises(ConfigError, match=r"of mine 1\.0 must be .* whose `options_type`, if any, is a dataclass"):
        get_launcher("untyped")


@pytest.mark.parametrize("group", BUILT_IN)
def test_a_name_that_is_registered_twice_is_refused(install: Install, group: str) -> None:
    for name in ("one", "two"):
        install(name, {group: {"double": f"plugin_{name}:Class"}})
    with pytest.raises(ConfigError) as error:
        USES[group]("double")
    said = str(error.value)
    assert "'double' is registered twice: by one 1.0 (plugin_one:Class) and by two 1.0 (plugin_two:Class)." in said
    assert said.endswith("Uninstall one of them.")


def test_no_distribution_takes_a_name_of_ours_over(install: Install) -> None:
    install("taker", {group: dict.fromkeys((*names, "auto"), "plugin_taker:C") for group, names in BUILT_IN.items()})
    assert {plugin.is_hidden for plugin in find_plugins()} == {True}
    assert get_launcher("slurm").__class__.__module__ == "paceline.launch.slurm"
    assert find_traits("ddp") is STRATEGIES["ddp"]
    assert load_task_class("transformer").__module__ == "paceline_tasks.transformer"
    assert RunConfig(on="auto", strategy="auto").strategies == ("ddp",)
    for group, names in BUILT_IN.items():
        assert all_names(group) == tuple(names)


# --- The table of our own ---


def test_every_strategy_of_the_table_says_what_it_can_do() -> None:
    assert STRATEGIES.keys() | TRAITS.keys() == BUILT_IN["paceline.strategies"].keys()
    assert not STRATEGIES.keys() & TRAITS.keys()


@pytest.mark.integration
def test_every_class_of_the_table_is_there() -> None:
    for names in BUILT_IN.values():
        for place in names.values():
            assert isinstance(import_object(place), type), place
