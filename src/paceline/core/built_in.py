"""Every name of Paceline's own, and where it is defined. Nothing else in the core names a plug-in of this repository.

A plug-in is a package next to the core, such as ``paceline_tune`` in ``plugins/tune``, which the core imports by these
tables only. Other distributions add names by entry points; see :mod:`paceline.core.plugins`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from paceline.core.option_groups import EnvStyle, RankLauncher
    from paceline_frameworks.submit import FunctionJob as FunctionJob
    from paceline_frameworks.submit import TaskJob as TaskJob
    from paceline_frameworks.submit import submit as submit
    from paceline_frameworks.submit import submit_array as submit_array
    from paceline_lightning import LightningTask as LightningTask
    from paceline_lm import TransformersTask as TransformersTask
    from paceline_own_loop.run import Run as Run
    from paceline_own_loop.step import LoopStep as LoopStep
    from paceline_serving.encodings import Categories as Categories
    from paceline_serving.encodings import Dates as Dates
    from paceline_serving.encodings import Tokenizer as Tokenizer
    from paceline_serving.encodings import Vocabulary as Vocabulary
    from paceline_trackers.media import log_histogram as log_histogram
    from paceline_trackers.media import log_image as log_image
    from paceline_trackers.media import log_text as log_text


@dataclass(frozen=True)
class CliCommand:
    """A command of ``paceline``.

    Attributes:
        group: its heading in the list of all commands.
        reference: ``module:function``, which is imported when the command is used.
        help: what it does, in one sentence.
        usage: its usage line, of commands with so many options that inspecting each again would take long.
        computes: the user's own code prints, with the colours and redrawn lines that it likes.
        trains: it trains, in this process or in those that it starts.
        takes_run_options: besides its own options, it has those of ``paceline train``.
        one_argument: what to type where an argument too many was given.
    """

    group: str
    reference: str
    help: str
    usage: str | None = None
    computes: bool = False
    trains: bool = False
    takes_run_options: bool = False
    one_argument: str = ""


COMMANDS: Mapping[str, CliCommand] = {
    "train": CliCommand(
        "Start",
        "paceline.cli.train:train",
        "Train a task on one process or many.",
        usage="[OPTIONS] TASK",
        computes=True,
        trains=True,
    ),
    "resume": CliCommand(
        "Start",
        "paceline.cli.train:resume",
        "Continue a run at its exact next sample.",
        usage="[OPTIONS] RUN",
        computes=True,
        trains=True,
    ),
    "fork": CliCommand(
        "Start",
        "paceline_fine_tuning.fork_command:fork",
        "Continue from a run's checkpoint with other hyperparameters.",
    ),
    "launch": CliCommand(
        "Start",
        "paceline.cli.launch:launch",
        "Start any program on one process or many nodes.",
        usage="--on NAME [OPTIONS] -- COMMAND...",
        computes=True,
    ),
    "show-task": CliCommand(
        "Start", "paceline_lm.show_task:show_task", "Write a task such as hf:MODEL as a Python class to edit."
    ),
    "join": CliCommand(
        "Start", "paceline.cli.join:join", "Add this machine to a running job.", computes=True, trains=True
    ),
    "scale": CliCommand(
        "Start", "paceline_pages.jobs_command:scale", "Change the number of processes of a running job."
    ),
    "plan": CliCommand(
        "Start",
        "paceline_planning.command:plan",
        "Predict each strategy's memory and step time; recommend one.",
        computes=True,
    ),
    "doctor": CliCommand(
        "Start",
        "paceline_checks.doctor_command:doctor",
        "Check a job's nodes and network before the job runs.",
        usage="[OPTIONS] [TASK]",
        computes=True,
    ),
    "runs": CliCommand(
        "Look", "paceline_pages.runs_command:app", "List runs with state and results; show one run's history."
    ),
    "logs": CliCommand("Look", "paceline_pages.logs_command:logs", "Show what each rank of a run printed."),
    "dashboard": CliCommand(
        "Look", "paceline_pages.dashboard_command:dashboard", "Show runs and jobs live on a local web page."
    ),
    "report": CliCommand(
        "Look", "paceline_pages.report_command:report", "Analyse and compare runs; check recorded metrics."
    ),
    "jobs": CliCommand("Look", "paceline_pages.jobs_command:jobs", "List submitted jobs."),
    "status": CliCommand("Look", "paceline_pages.jobs_command:status", "Show a job's state."),
    "cancel": CliCommand("Look", "paceline_pages.jobs_command:cancel", "Cancel a job."),
    "audit": CliCommand("Prove", "paceline.cli.audit:audit", "Prove from a run's ledger that it saw each sample once."),
    "verify": CliCommand(
        "Prove",
        "paceline_checks.verify_command:verify",
        "Train under every strategy, and compare with one process.",
        usage="[OPTIONS] TASK",
        computes=True,
        trains=True,
        takes_run_options=True,
    ),
    "chaos": CliCommand(
        "Prove",
        "paceline_checks.chaos_command:chaos",
        "Train under injected faults, and prove that nothing is lost.",
        usage="[OPTIONS] TASK",
        computes=True,
        trains=True,
        takes_run_options=True,
    ),
    "bench": CliCommand(
        "Prove", "paceline_checks.bench_command:app", "Measure collectives on your machines.", computes=True
    ),
    "tune": CliCommand(
        "Tune",
        "paceline_tune.command:tune",
        "Search for a task's best hyperparameters in parallel trials.",
        usage="[OPTIONS] TASK",
        computes=True,
        trains=True,
        takes_run_options=True,
        one_argument="To continue a search: paceline tune --resume SEARCH.",
    ),
    "export": CliCommand("Serve", "paceline.cli.export:export", "Export a run's model as a package."),
    "registry": CliCommand("Serve", "paceline_serving.registry_command:app", "List, tag, copy and roll back packages."),
    "serve": CliCommand(
        "Serve", "paceline_serving.serve_command:serve", "Serve packages over HTTP (Open Inference Protocol v2)."
    ),
    "deploy": CliCommand("Serve", "paceline_serving.serve_command:deploy", "Replace the package of a running server."),
    "predict": CliCommand("Serve", "paceline_serving.predict_command:predict", "Predict with a package or a server."),
    "gc": CliCommand("Keep clean", "paceline_maintenance.gc:gc", "Remove old runs and packages."),
    "checkpoint": CliCommand(
        "Keep clean", "paceline_maintenance.checkpoint_command:app", "List, verify and remove a run's checkpoints."
    ),
    "config": CliCommand(
        "Other", "paceline.cli.options:show_config", "Show the options that files of defaults set, and which file."
    ),
    "version": CliCommand(
        "Other", "paceline.cli.version:version", "Print the versions of Paceline and its dependencies."
    ),
}
"""The commands, in the order of ``paceline --help``."""

Group = Literal["paceline.launchers", "paceline.strategies", "paceline.trackers", "paceline.tasks"]
"""The group in which an entry point is registered."""

NAMES: Mapping[str, str] = {
    "Categories": "paceline_serving.encodings:Categories",
    "Dates": "paceline_serving.encodings:Dates",
    "FunctionJob": "paceline_frameworks.submit:FunctionJob",
    "LightningTask": "paceline_lightning:LightningTask",
    "LoopStep": "paceline_own_loop.step:LoopStep",
    "Run": "paceline_own_loop.run:Run",
    "TaskJob": "paceline_frameworks.submit:TaskJob",
    "TransformersTask": "paceline_lm:TransformersTask",
    "Tokenizer": "paceline_serving.encodings:Tokenizer",
    "Vocabulary": "paceline_serving.encodings:Vocabulary",
    "log_histogram": "paceline_trackers.media:log_histogram",
    "log_image": "paceline_trackers.media:log_image",
    "log_text": "paceline_trackers.media:log_text",
    "submit": "paceline_frameworks.submit:submit",
    "submit_array": "paceline_frameworks.submit:submit_array",
}
"""The names in ``paceline`` that a plug-in defines, as ``module:name``."""

BUILT_IN: Mapping[Group, Mapping[str, str]] = {
    "paceline.launchers": {
        "inprocess": "paceline.launch.local:InProcess",
        "spawn": "paceline.launch.local:Spawn",
        "torchrun": "paceline.launch.torchrun:Torchrun",
        "slurm": "paceline.launch.slurm:Slurm",
        "submitit": "paceline_frameworks.submitit:Submitit",
        "ray": "paceline_ray.launcher:Ray",
        "monarch": "paceline_frameworks.monarch:Monarch",
        "mpi": "paceline.launch.mpi:MpiLauncher",
        "horovod": "paceline_frameworks.horovod:HorovodLauncher",
        "ssh": "paceline.launch.ssh:Ssh",
        "kubernetes": "paceline_kubernetes.launcher:Kubernetes",
        "sagemaker": "paceline_clouds.sagemaker:SageMaker",
        "azureml": "paceline_clouds.rendered:AzureML",
        "google": "paceline_clouds.rendered:Google",
    },
    "paceline.strategies": {
        "single": "paceline.parallel.strategy:Single",
        "dp": "paceline_more_strategies.dp_threads:DataParallel",
        "ddp": "paceline.parallel.strategy:DDP",
        "zero1": "paceline.parallel.zero1:ZeRO1",
        "fsdp": "paceline.parallel.fsdp:FSDP",
        "tp": "paceline.parallel.tensor_parallel:TP",
        "pp": "paceline.parallel.pipeline.pipeline:Pipeline",
        "deepspeed": "paceline_frameworks.deepspeed:DeepSpeed",
        "horovod": "paceline_frameworks.horovod_strategy:Horovod",
        "ps": "paceline_more_strategies.parameter_server:ParameterServer",
        "hogwild": "paceline_more_strategies.hogwild:Hogwild",
    },
    "paceline.trackers": {
        "mlflow": "paceline_trackers.mlflow:MlflowTracker",
        "wandb": "paceline_trackers.wandb:WandbTracker",
    },
    "paceline.tasks": {
        "fashion-mnist": "paceline_tasks.fashion_mnist:FashionMNIST",
        "fashion-mnist-mlp": "paceline_tasks.fashion_mnist:FashionMNISTMLP",
        "transformer": "paceline_tasks.transformer:Transformer",
    },
}
"""The class of each name of ours, as an entry point's value: ``module:Class``."""

RECORDED_TASKS: Mapping[str, str] = {"paceline.own_loop:OwnLoop": "paceline_own_loop.parts:OwnLoop"}
"""Classes of tasks by the names under which runs record them, where a class is in another module now."""


@dataclass(frozen=True)
class TaskPrefix:
    """Tasks of one class that the command line names by a prefix, such as ``hf:DIR``.

    Attributes:
        reference: ``module:Class``.
        field: the field whose value is the text after the prefix.
        flags: further fields with a flag of their own: the name of its value, empty if it takes none, and its help.
    """

    reference: str
    field: str
    flags: Mapping[str, tuple[str, str]]


TASK_PREFIXES: Mapping[str, TaskPrefix] = {
    "hf": TaskPrefix(
        "paceline_lm:LanguageModel",
        "model",
        {
            "data": (
                "PLACE",
                "Training data: JSONL, Parquet, bin:FILE or stream:PLACE; a pattern, address or mixture A=0.7,B=0.3.",
            ),
            "val_data": ("PLACE", "Validation data, in the same forms."),
            "pack": ("TOKENS", "Fill samples of this length with documents, which do not see each other."),
            "concat": ("", "Fill them with documents one after another, which are cut where a sample ends."),
            "context": ("TOKENS", "The most tokens of a document. Default: of a pack, or of the model's positions."),
            "tokens": ("NUMBER", "The tokens to train on, such as 20B, in place of --epochs."),
            "from_scratch": ("", "Initialise the weights: MODEL needs only its configuration."),
            "eval_samples": ("FILE", "Prompts, a line each, to complete at each evaluation (media/samples)."),
            "lr_schedule": ("NAME", "linear, cosine or constant."),
            "warmup": ("SHARE", "Steps in which the learning rate rises, such as 1%."),
        },
    )
}
"""Tasks that the command line names by a prefix: it replaces the name by the class and its fields."""

ENGINE_PARTS = ("powersgd",)
"""Parts of a checkpoint that the engine of a plug-in adds."""

DIRECTORY_FORMATS: Mapping[str, str] = {
    "hf": "paceline_lm.hf_directory:export_hf",
    "peft": "paceline_lm.peft_directory:export_peft",
}
"""The values of ``export --format`` that another library loads as a directory, as ``module:function``."""

VERIFIED = ("paceline_more_strategies.verify_cases:CASES", "paceline_frameworks.verify_cases:CASES")
"""Cases of ``paceline verify`` for the strategies of plug-ins."""

LAUNCHER_OPTIONS: Mapping[str, str] = {
    "spawn": "paceline.launch.launcher:RendezvousOptions",
    "torchrun": "paceline.launch.launcher:TorchrunOptions",
    "slurm": "paceline.launch.launcher:SlurmOptions",
    "submitit": "paceline_frameworks.submitit:SubmititOptions",
    "ray": "paceline_ray.launcher:RayOptions",
    "monarch": "paceline_frameworks.monarch:MonarchOptions",
    "mpi": "paceline.launch.mpi:MpiOptions",
    "horovod": "paceline_frameworks.horovod:HorovodOptions",
    "ssh": "paceline.launch.ssh:SshOptions",
    "kubernetes": "paceline_kubernetes.options:KubernetesOptions",
    "sagemaker": "paceline_clouds.options:SageMakerOptions",
    "azureml": "paceline_clouds.rendered:AzureMLOptions",
    "google": "paceline_clouds.rendered:GoogleOptions",
}
"""Each launcher's own options, which ``--help`` imports without the launcher; a plug-in's class names its own."""

OPTION_GROUPS = (
    "paceline_checks.options:CheckOptions",
    "paceline_more_strategies.options:LoadBalanceOptions",
    "paceline_more_strategies.options:CommunicationOptions",
    "paceline.parallel.options:FsdpOptions",
    "paceline_frameworks.strategy_options:DeepSpeedOptions",
    "paceline.parallel.options:MemoryOptions",
    "paceline_more_strategies.options:ServerOptions",
    "paceline_more_strategies.options:DataParallelOptions",
    "paceline.parallel.options:TensorOptions",
    "paceline.parallel.options:PipelineOptions",
    "paceline_fine_tuning.options:FineTuningOptions",
    "paceline_planning.options:ProfileOptions",
    "paceline_pages.metrics_options:MetricsOptions",
)
"""The groups of a run's options besides those of :mod:`paceline.core`."""

TRAITS: Mapping[str, str] = {
    "dp": "paceline_more_strategies.options:DATA_PARALLEL",
    "deepspeed": "paceline_frameworks.strategy_options:DEEPSPEED",
    "horovod": "paceline_frameworks.strategy_options:HOROVOD",
    "ps": "paceline_more_strategies.options:PARAMETER_SERVER",
    "hogwild": "paceline_more_strategies.options:HOGWILD",
}
"""What further strategies can do, which ``--help`` and checks import without the strategy."""

PARTS: Mapping[str, str] = {
    "--backup-to": "paceline_stores.backup:Backup",
    "--coordinator": "paceline_etcd.membership:EtcdMembership",
    "--pp-schedule pipedream": "paceline_more_strategies.pipedream:PipeDream",
    "--log-to": "paceline_trackers.writer:require_trackers",
    "--log-to's writers": "paceline_trackers.writer:start_writers",
    "--preflight": "paceline_checks.preflight.job",
    "--rank-launcher ray": "paceline_ray.node:ray_node_command",
    "--strategy fsdp": "paceline_more_strategies.deferred_init:build_late",
    "--strategy fsdp's memory": "paceline_planning.auto:require_memory",
    "--strategy auto": "paceline_planning.auto:choose_by_plan",
    "SageMaker's nodes": "paceline_clouds.nodes:sagemaker_node",
    "Vertex AI's nodes": "paceline_clouds.nodes:vertex_node",
    "doctor --horovod": "paceline_frameworks.horovod:check_build",
    "resume": "paceline_stores.run_store:restore_run",
    "runs at addresses": "paceline_stores.run_store:ObjectRunStore",
    "data": "paceline_stores.objects:download",
    "export": "paceline_serving.observed_inputs:observe_inputs",
    "launch": "paceline_frameworks.script_warnings:script_warnings",
    "notebooks": "paceline_own_loop.notebook:write_task",
    "scripts": "paceline_own_loop.ranks:run_script",
    "runs --in": "paceline_trackers.tracking_tools:show_runs",
    "train_step": "paceline_own_loop.composed_step:ComposedStep",
    "trials": "paceline_tune.trial_scheduler:TrialSchedulerClient",
}
"""What a plug-in does for an option or a command of the core, as ``module:name``."""

SLURM_BODIES: Mapping[RankLauncher, str] = {"horovod": "paceline_frameworks.horovod:slurm_body"}
"""The shell code of rank launchers that the core does not have, in the script of a Slurm job."""

FRAMEWORKS: Mapping[EnvStyle, str] = {"tensorflow": "paceline_frameworks.tensorflow"}
"""The module of a framework with rank variables of its own; see :class:`paceline.launch.rank.Framework`."""

RANK_DETECTORS: Mapping[str, str] = {"HOROVOD_RANK": "paceline_frameworks.horovod_environment:detect_horovod"}
"""What returns the rank of a process, by the environment variable that its launcher sets."""

PACKAGES = frozenset(
    reference.partition(":")[0].partition(".")[0]
    for reference in (
        *(command.reference for command in COMMANDS.values()),
        *OPTION_GROUPS,
        *(prefix.reference for prefix in TASK_PREFIXES.values()),
        *(
            reference
            for references in (NAMES, PARTS, DIRECTORY_FORMATS, LAUNCHER_OPTIONS, *BUILT_IN.values())
            for reference in references.values()
        ),
    )
)
"""The core and its plug-ins, as packages to import."""
