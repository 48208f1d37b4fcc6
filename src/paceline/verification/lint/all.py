"""All looks at a task, one after another."""

from __future__ import annotations

import logging
import warnings

from paceline.config import RunConfig
from paceline.task import Task
from paceline.verification.lint import evaluation, means, parameters, randomness, ranks
from paceline.verification.lint.subject import Subject
from paceline.verification.report import Finding

_log = logging.getLogger(__name__)

LINTS = (
    means.look_at_the_loss,
    means.look_at_the_metrics,
    randomness.look_at_the_loss,
    randomness.look_at_the_data,
    parameters.look_at_the_gradients,
    parameters.look_at_batch_norm,
    parameters.look_at_the_schedulers,
    evaluation.look_at_duplicates,
    ranks.look_at_the_ranks,
)


def lint(task: Task, config: RunConfig) -> list[Finding]:
    """What is probably not meant in a task's arithmetic.

    Args:
        task: an instance that nothing else uses.
        config: with ``shards``, ``global_batch_size`` and ``max_steps``.
    """
    subject = Subject(task, config)
    findings: list[Finding] = []
    for look in LINTS:
        try:
            with warnings.catch_warnings():
                # Of steps that are not those of a training, such as a scheduler's before the optimizer's.
                warnings.simplefilter("ignore")
                findings += look(subject)
        except Exception as error:
            # What fails here fails in training too, or takes what only a trainer gives: the runs will tell.
            _log.debug("lint", exc_info=error)
            findings.append(
                Finding(
                    lint="not-looked-at",
                    message=f"{look.__module__.rpartition('.')[2]}.{look.__name__} could not be done: "
                    f"{type(error).__name__}: {error}",
                )
            )
    return findings
