"""What a report says first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.intervals import Estimate
from paceline.reporting.analysis import Analysis
from paceline.reporting.comparison import Comparison


@dataclass(frozen=True)
class Verdict:
    """The first screen.

    Attributes:
        headline: a few words.
        sentence: what they rest on.
        marks: (tone, text): "good", "bad" or "plain".
    """

    headline: str
    sentence: str
    marks: tuple[tuple[str, str], ...]


def verdict(analyses: Sequence[Analysis], comparisons: Sequence[Comparison]) -> Verdict:
    """Of one run, what it reached; of several, who is better."""
    first = analyses[0]
    if len(analyses) == 1:
        name = first.main_metric
        estimate = first.metrics[name]
        return Verdict(f"{number(estimate)} {name}", _measured(first, estimate), tuple(_marks(first)))
    better = [c.name for c in comparisons if c.better]
    worse = [c.name for c in comparisons if c.better is False]
    # With more than two runs: each is held against the first only, and that is what is said.
    if better:
        headline = f"{_listed(better)} {'is' if len(better) == 1 else 'are'} better than {first.record.name}"
    elif worse and len(worse) == len(comparisons):
        headline = f"{first.record.name} is better than {_listed(worse)}"
    elif all(c.difference is None for c in comparisons):
        headline = "These runs cannot be compared"
    else:
        told = f", and better than {_listed(worse)}" if worse else ""
        others = _listed([c.name for c in comparisons if c.difference is not None and c.better is None])
        headline = f"{first.record.name} cannot be told from {others}{told}"
    return Verdict(headline, " ".join(map(_compared, comparisons)), ())


def number(estimate: Estimate) -> str:
    """For people: a share in per cent, anything else with four digits."""
    return shown(estimate.value, estimate)


def interval(estimate: Estimate) -> str:
    """Both ends, or nothing."""
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{shown(estimate.low, estimate).removesuffix(' %')} to {shown(estimate.high, estimate)}"


def shown(value: float, like: Estimate) -> str:
    """A number, written as ``like`` is."""
    return f"{100 * value:.2f} %" if like.is_share else f"{value:#.4g}".removesuffix(".")


def probability(value: float) -> str:
    """A p-value."""
    return "p < 0.001" if value < 0.001 else f"p = {value:.3f}"


def _measured(analysis: Analysis, estimate: Estimate) -> str:
    sure = f"95 % interval {interval(estimate)}. " if estimate.low is not None else ""
    which = "best" if analysis.is_best else "model"
    return (
        f"{sure}Measured on the {analysis.data.samples:,} samples of the {analysis.split} split, with the "
        f"{which + ' model' if analysis.is_best else which} after step {analysis.step:,}."
    )


def _marks(analysis: Analysis) -> list[tuple[str, str]]:
    record = analysis.record
    marks = [("good" if record.state == "finished" else "bad", record.state)]
    if analysis.recorded:
        differ = [n for n, e in analysis.metrics.items() if analysis.recorded.get(n) not in (None, e.value)]
        same = "the numbers that the run recorded, to the last bit"
        marks.append(("bad", f"the run recorded another {_listed(differ)}") if differ else ("good", same))
    faults = sum(1 for entry in record.timeline.entries if entry.event in ("fault", "node lost", "hang"))
    recoveries = (record.result or {}).get("recoveries")
    if faults:
        told = f"{faults} fault{'s' if faults > 1 else ''}"
        marks.append(("plain", f"{told}, {recoveries} recovered in place" if recoveries else told))
    else:
        marks.append(("plain", "no faults"))
    return marks


def _compared(comparison: Comparison) -> str:
    difference = comparison.difference
    if difference is None:
        return f"{comparison.name} cannot be compared: {comparison.why_not}."
    points = f"{comparison.metric} {points_of(difference.estimate)}"
    said = {True: "better", False: "worse", None: "no difference that chance does not explain"}
    return (
        f"{comparison.name}: {points}, {said[comparison.better]} "
        f"({difference.test}, {probability(difference.p_value)})."
    )


def points_of(estimate: Estimate) -> str:
    """A difference with its sign and its interval; of shares, in percentage points."""

    def signed(value: float) -> str:
        return (f"{100 * value:+.2f}" if estimate.is_share else f"{value:+.4f}").replace("-", "−")

    known = estimate.low is not None and estimate.high is not None
    ends = f" ({signed(estimate.low or 0.0)} to {signed(estimate.high or 0.0)})" if known else ""
    return f"{signed(estimate.value)}{ends}{' points' if estimate.is_share else ''}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
