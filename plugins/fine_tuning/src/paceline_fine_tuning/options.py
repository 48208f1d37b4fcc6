"""Options of fine-tuning: initial weights, and which parameters train at which rate."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from paceline.core.errors import ConfigError
from paceline.core.files import check_location
from paceline.core.options import Changes, OptionGroup, Requirement, at_least, option

if TYPE_CHECKING:
    from paceline.core.config import RunConfig

ALL_LINEAR = "all-linear"
"""The target of ``--lora`` for every linear layer but the last."""


_PARENT = Requirement(
    "init_from",
    message="{flag} reinitializes layers of the model from --init-from. Add --init-from RUN, or leave {flag} out.",
)


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters: each adds ``alpha / rank * B @ A`` to the weight of a frozen linear layer.

    Attributes:
        rank: rows of A, columns of B.
        alpha: scales the product, as above.
        targets: patterns of the layers' names; :data:`ALL_LINEAR` alone for all.
        quantize: what the weights of these layers are quantized to; None: nothing.
    """

    rank: int = 8
    alpha: int = 16
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    quantize: Literal["nf4"] | None = None

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


def parse_lr_scale(text: str) -> tuple[str, float]:
    """Parse "PATTERN=FACTOR"."""
    pattern, _, factor = text.rpartition("=")
    try:
        value = float(factor)
    except ValueError:
        value = -1.0
    if pattern and value == 0:
        raise ConfigError(f"--lr-scale {text}: the factor must not be 0. Use --freeze '{pattern}'.")
    if not pattern or not 0 < value < float("inf"):
        raise ConfigError(
            f"--lr-scale must be PATTERN=FACTOR with a positive factor, such as 'backbone.*=0.1', but is {text!r}."
        )
    return pattern, value


def parse_lora(text: str) -> Lora:
    """Parse "rank=8,alpha=16,dropout=0.1,target=query|value"; alpha defaults to twice the rank."""
    settings: dict[str, str] = {}
    for word in text.split(","):
        match = re.fullmatch(r"\s*(rank|alpha|dropout|target|quantize)\s*=\s*(\S+)\s*", word)
        if match is None or match[1] in settings:
            raise ConfigError(
                "--lora must be like rank=8,alpha=16,target=query|value, with rank, alpha, dropout, target and "
                f"quantize at most once each, but is {text!r}."
            )
        settings[match[1]] = match[2]
    try:
        rank = int(settings.get("rank", "8"))
        alpha = int(settings.get("alpha", 2 * rank))
        dropout = float(settings.get("dropout", "0"))
    except ValueError:
        raise ConfigError(
            f"--lora {text}: rank and alpha are whole numbers, dropout is a number, such as rank=8,alpha=16."
        ) from None
    at_least("lora", rank, 1)
    if alpha < 1 or not 0 <= dropout < 1:
        raise ConfigError(f"--lora {text}: alpha must be positive, and dropout at least 0 and below 1.")
    targets = tuple(name for name in settings.get("target", ALL_LINEAR).split("|") if name)
    if not targets or (ALL_LINEAR in targets and len(targets) > 1):
        raise ConfigError(f"--lora {text}: target must be {ALL_LINEAR}, or layer names separated by |.")
    if settings.get("quantize", "nf4") != "nf4":
        raise ConfigError(f"--lora {text}: quantize must be nf4, or left out.")
    return Lora(
        rank=rank, alpha=alpha, dropout=dropout, targets=targets, quantize="nf4" if "quantize" in settings else None
    )


_fine_tuning_option = partial(option, group="Fine-tuning", resume="fixed", bits="always", scope="training")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class FineTuningOptions(OptionGroup):
    """Options of runs that start from another run's weights."""

    init_from: str | None = _fine_tuning_option(
        None,
        "Start from the weights of another run (its best checkpoint, or RUN@last, RUN@STEP; RUN may be its address in "
        "an object store), of a checkpoint's directory (also torch.distributed.checkpoint's), of a package, or of a "
        "file of safetensors.",
    )
    reset_head: bool = _fine_tuning_option(
        False,
        "With --init-from: reinitialize the model's last layer, as for another number of classes.",
        requires=_PARENT,
    )
    reset: tuple[str, ...] = _fine_tuning_option(
        (),
        "With --init-from: reinitialize the layer or parameter of this name, with * for any text; may be repeated.",
        requires=_PARENT,
    )
    freeze: tuple[str, ...] = _fine_tuning_option(
        (),
        "Do not train the layer or parameter of this name, such as layer1.*; may be repeated. Frozen batch "
        "norms keep their statistics.",
    )
    lr_scale: tuple[tuple[str, float], ...] = _fine_tuning_option(
        (),
        "PATTERN=FACTOR: multiply the learning rate of matching parameters; may be repeated, the last match counts.",
        parse=parse_lr_scale,
    )
    lora: Lora | None = _fine_tuning_option(
        None,
        "Train only low-rank adapters of linear layers, such as rank=8,alpha=16,target=query|value. "
        "Default target: all linear layers but the last; dropout=0.1 may be added, and quantize=nf4, which keeps their "
        "frozen weights in four bits (QLoRA).",
        parse=parse_lora,
    )

    def changes(self, config: RunConfig) -> Changes:
        """Any of these options changes the model or the optimizers' groups."""
        given = self.init_from or self.freeze or self.lr_scale or self.lora
        return Changes(preparation="paceline_fine_tuning.preparation:FineTuning" if given else None)

    def check(self, config: RunConfig) -> None:
        """Reject what has no effect with adapters."""
        if self.init_from is not None:
            check_location(self.init_from, "--init-from")
        if self.lora is None:
            return
        if self.lora.quantize is not None and "tp" in config.strategies:
            raise ConfigError("--lora quantize=nf4: --strategy tp cannot split quantized weights. Use fsdp.")
        if self.freeze:
            raise ConfigError("--lora trains only its adapters, so --freeze has no effect. Leave one of them out.")
        if self.lr_scale:
            raise ConfigError(
                "--lora trains only its adapters. Set their learning rate with --set, and leave --lr-scale out."
            )
