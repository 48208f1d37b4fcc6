"""The options of a run as types of keywords, which tests/core/test_interface.py writes from their groups."""

from __future__ import annotations

from os import PathLike
from typing import Literal, TypedDict

Texts = str | list[str] | tuple[str, ...]

class LoopOptions(TypedDict, total=False):
    """Those of :class:`paceline.Run`."""

    nproc: int | str
    node_rank: int | None
    rdzv_endpoint: str | None
    token_file: str | None
    rdzv_id: str
    backend: Literal["auto", "gloo", "nccl"]
    interface: str | None
    init_timeout: str
    comm_debug: bool
    threads: int | None
    device: Literal["auto", "cpu", "cuda"]
    recover: Literal["auto", "none", "inplace", "restart"]
    hot_spares: int
    max_restarts: int
    coordinator: str | None
    walltime: str | None
    heartbeat: float
    hang_timeout: str
    strategy: str
    mesh: str | None
    microbatches: int | Literal["auto"] | None
    grad_accumulation: int
    sdc_check_every: int
    purity: Literal["error", "warn", "off"]
    load_balance: Literal["auto", "equal"]
    local_sgd_steps: int
    outer_optimizer: Literal["none", "nesterov"]
    outer_lr: float
    outer_momentum: float
    comm_hook: Literal["none", "fp16", "bf16", "powersgd"]
    powersgd_rank: int
    fsdp_wrap: str
    fsdp_reshard: Literal["auto", "always", "never"]
    fsdp_offload: bool
    fsdp_mixed_precision: bool
    zero_stage: Literal[1, 2, 3]
    checkpoint_activations: Literal["none", "block", "selective"]
    checkpoint_blocks: str
    ps_mode: Literal["sync", "async", "ssp"]
    ps_staleness: int | None
    ps_servers: int
    dp_devices: int | Literal["auto"]
    sequence_parallel: bool
    pp_schedule: Literal["sequential", "gpipe", "1f1b", "interleaved", "zero-bubble", "pipedream"]
    pp_split: str
    profile: int
    metrics_port: int | None
    metrics_host: str
    metrics_token_file: str | None
    seed: int
    precision: Literal["fp32", "bf16", "fp16"]
    clip_norm: float | None
    shuffle: str
    num_workers: int | Literal["auto"]
    best_metric: str | None
    resume: Literal["auto", "never", "must"]
    checkpoint_every: Texts
    keep_checkpoints: int
    backup_to: PathLike[str] | str | None
    log_every: int
    log_format: Literal["text", "json"]
    log_to: Texts

class TaskOptions(LoopOptions, total=False):
    """Those of a task."""

    nodes: int | str
    reduction: Literal["exact", "allreduce", "ddp"]
    init_from: PathLike[str] | str | None
    reset_head: bool
    reset: Texts
    freeze: Texts
    lr_scale: Texts
    lora: str | None
    global_batch_size: int | None
    epochs: int | None
    max_steps: int | None
    ema: float | None
    compile: bool
    val_fraction: float | None
    eval_every: str
    early_stop: str | None
    run_dir: PathLike[str] | str | None

class RunOptions(TaskOptions, total=False):
    """Those of :func:`paceline.fit`."""

    on: str
