"""Fine-tuning: where a run's weights come from, and which of them it changes how fast."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.config.options import at_least, option
from paceline.config.parallelism import ParallelOptions
from paceline.errors import ConfigError

ALL_LINEAR = "all-linear"
"""The target of ``--lora`` that is every linear layer but the last."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters: each adds ``alpha / rank * B @ A`` to the weight of a frozen linear layer.

    Attributes:
        rank: rows of A, columns of B.
        alpha: scales what is added, as above.
        dropout: the probability with which an adapter's input is dropped.
        targets: patterns of the layers' names; :data:`ALL_LINEAR` alone for all.
    """

    rank: int = 8
    alpha: int = 16
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)

    @property
    def scaling(self) -> float:
        """What the product of the two matrices is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class FineTuningOptions(ParallelOptions):
    """What goes on from another run."""

    init_from: str | None = option(
        None,
        "Begin with the weights of another run, of its best checkpoint unless RUN@last or RUN@STEP says "
        "otherwise, of a checkpoint's directory, or of a package.",
        group="Fine-tuning",
    )
    reset_head: bool = option(
        False,
        "With --init-from, begin the model's last layer anew, as for another number of classes.",
        group="Fine-tuning",
    )
    reset: tuple[str, ...] = option(
        (),
        "With --init-from, begin these anew: the name of a layer or parameter, with * for any; may be "
        "repeated.",
        group="Fine-tuning",
    )
    freeze: tuple[str, ...] = option(
        (),
        "Do not train these: the name of a layer or parameter, such as layer1.*; may be repeated. Batch "
        "norms that are frozen keep their statistics, too.",
        group="Fine-tuning",
    )
    lr_scale: tuple[str, ...] = option(
        (),
        "PATTERN=FACTOR: what matches learns at so many times the learning rate; may be repeated, and the "
        "last one that matches counts.",
        group="Fine-tuning",
    )
    lora: str | None = option(
        None,
        "Train low-rank adapters of linear layers, and nothing else: rank=8,alpha=16,target=query|value. "
        "Left out, target is all linear layers but the last; dropout=0.1 may be added.",
        group="Fine-tuning",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init_from is None:
            for name, given in (("--reset-head", self.reset_head), ("--reset", self.reset)):
                if given:
                    raise ConfigError(
                        f"{name} begins a layer anew where --init-from would give it weights. Add "
                        f"--init-from RUN, or leave {name} out."
                    )
        for text in self.lr_scale:
            parse_lr_scale(text)
        if self.lora is not None:
            parse_lora(self.lora)
            if self.freeze:
                raise ConfigError(
                    "--lora trains its adapters only, so --freeze has nothing to add. Leave one of them out."
                )
            if self.lr_scale:
                raise ConfigError(
                    "--lora trains its adapters only; give them their learning rate with --set, and leave "
                    "--lr-scale out."
                )

    @property
    def adapters(self) -> Lora | None:
        """What ``--lora`` asks for."""
        return None if self.lora is None else parse_lora(self.lora)


def parse_lr_scale(text: str) -> tuple[str, float]:
    """Pattern and factor of "PATTERN=FACTOR".

    Raises:
        ConfigError: the text has another form, or the factor is not positive.
    """
    pattern, _, factor = text.rpartition("=")
    try:
        value = float(factor)
    except ValueError:
        value = -1.0
    if pattern and value == 0:
        raise ConfigError(f"--lr-scale {text}: what does not learn is frozen. Use --freeze '{pattern}'.")
    if not pattern or not 0 < value < float("inf"):
        raise ConfigError(
            f"--lr-scale must be PATTERN=FACTOR with a positive factor, such as 'backbone.*=0.1', but is "
            f"{text!r}."
        )
    return pattern, value


def parse_lora(text: str) -> Lora:
    """The adapters that "rank=8,alpha=16,dropout=0.1,target=query|value" describes; alpha is twice the rank.

    Raises:
        ConfigError: the text has another form, or a number cannot work.
    """
    found: dict[str, str] = {}
    for word in text.split(","):
        match = re.fullmatch(r"\s*(rank|alpha|dropout|target)\s*=\s*(\S+)\s*", word)
        if match is None or match[1] in found:
            raise ConfigError(
                "--lora must be such as rank=8,alpha=16,target=query|value, with rank, alpha, dropout and "
                f"target at most once each, but is {text!r}."
            )
        found[match[1]] = match[2]
    try:
        rank = int(found.get("rank", "8"))
        alpha = int(found.get("alpha", 2 * rank))
        dropout = float(found.get("dropout", "0"))
    except ValueError:
        raise ConfigError(
            f"--lora {text}: rank and alpha are whole numbers, dropout is a number, such as rank=8,alpha=16."
        ) from None
    at_least("lora", rank, 1)
    if alpha < 1 or not 0 <= dropout < 1:
        raise ConfigError(f"--lora {text}: alpha must be positive, and dropout from 0 to below 1.")
    targets = tuple(name for name in found.get("target", ALL_LINEAR).split("|") if name)
    if not targets or (ALL_LINEAR in targets and len(targets) > 1):
        raise ConfigError(
            f"--lora {text}: target must be {ALL_LINEAR}, or names of layers with | between them."
        )
    return Lora(rank=rank, alpha=alpha, dropout=dropout, targets=targets)
