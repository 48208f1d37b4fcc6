"""Scores of classifiers are scikit-learn's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    confusion_matrix,
    f1_score,
    log_loss,
    precision_recall_fscore_support,
    roc_auc_score,
)

from paceline.core.errors import TaskError
from paceline.core.inference import InferenceSignature, TensorSpec
from paceline.core.task import Task
from paceline.data.samples import MicroBatch
from paceline_pages.evaluation_recorder import MISTAKES, Column, EvaluationRecorder, LargeError, Predictions
from paceline_pages.evaluation_results import ClassificationResult, classify, rank, regress
from paceline_pages.report_page import cells_of, columns_of, show
from paceline_serving.encodings import Categories, Dates, Vocabulary


class Given(Task):
    """Its batches hold probabilities and classes."""

    def inference_batch(self, batch: Any) -> Any:
        return [batch[0]], batch[1]


def observed(probabilities: torch.Tensor, actual: torch.Tensor, labels: tuple[str, ...] = ()) -> EvaluationRecorder:
    inference = InferenceSignature(
        module=torch.nn.Identity(),
        inputs={"x": TensorSpec(dtype="float32", shape=(probabilities.shape[1],))},
        outputs={"p": TensorSpec(dtype="float32", shape=(probabilities.shape[1],))},
        labels=labels,
        probabilities="p",
    )
    object.__setattr__(inference, "module", lambda given: {"p": given})
    observer = EvaluationRecorder(Given(), inference)
    for number, start in enumerate(range(0, len(actual), 64)):
        part = (probabilities[start : start + 64], actual[start : start + 64])
        observer(MicroBatch(number, part, len(part[1]), 0), {})
    return observer


def made(number: int, classes: int, seed: int = 1) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    actual = torch.randint(classes, (number,), generator=generator)
    logits = 1.5 * torch.randn(number, classes, generator=generator)
    logits[torch.arange(number), actual] += 1.5
    probabilities = logits.double().softmax(dim=1)
    predictions = observed(probabilities, actual, tuple(f"c{k}" for k in range(classes))).predictions()
    assert predictions is not None
    return SimpleNamespace(
        probabilities=probabilities,
        actual=actual.numpy(),
        predictions=predictions,
        found=classify(predictions),
    )


@pytest.fixture(scope="module", params=[5, 40])
def case(request: pytest.FixtureRequest) -> SimpleNamespace:
    return made(700, request.param)


def test_scores_are_scikit_learns(case: SimpleNamespace) -> None:
    found: ClassificationResult = case.found
    predictions: Predictions = case.predictions
    actual, predicted = case.actual, case.probabilities.argmax(dim=1).numpy()
    assert np.array_equal(predictions.actual, actual)
    assert np.array_equal(predictions.predicted, predicted)
    assert found.accuracy.value == (actual == predicted).mean()
    assert found.balanced_accuracy.value == pytest.approx(balanced_accuracy_score(actual, predicted))
    assert found.macro_f1.value == pytest.approx(f1_score(actual, predicted, average="macro"))
    assert found.nll.value == pytest.approx(log_loss(actual, case.probabilities.numpy()))
    one_hot = np.eye(case.probabilities.shape[1])[actual]
    assert found.brier.value == pytest.approx(((case.probabilities.numpy() - one_hot) ** 2).sum(axis=1).mean())
    scores = zip(
        *precision_recall_fscore_support(actual, predicted, zero_division=0),
        strict=True,
    )
    for score, (precision, recall, f1, support) in zip(found.classes, scores, strict=True):
        assert score.support == support
        assert (score.precision.value if score.precision else 0) == pytest.approx(precision)
        assert (score.recall.value if score.recall else 0) == pytest.approx(recall)
        assert score.f1 == pytest.approx(f1)


def test_intervals_hold_their_values(case: SimpleNamespace) -> None:
    for name in ("accuracy", "balanced_accuracy", "macro_f1", "nll", "brier"):
        estimate = getattr(case.found, name)
        assert estimate.low < estimate.value < estimate.high, name


def test_the_matrix_is_shown_where_it_can_be_read(case: SimpleNamespace) -> None:
    expected = confusion_matrix(case.actual, case.predictions.predicted)
    if len(expected) > 20:
        assert case.found.matrix is None
    else:
        assert np.array_equal(case.found.matrix, expected)
    np.fill_diagonal(expected, 0)
    first = case.found.confusions[0]
    assert first.count == expected.max()
    assert expected[int(first.actual[1:]), int(first.predicted[1:])] == first.count


def test_the_calibration_error_is_the_mean_gap_over_the_bins(case: SimpleNamespace) -> None:
    found, confidence = case.found, case.predictions.confidence
    by_hand = 0.0
    for k in range(15):
        inside = (confidence > k / 15) & (confidence <= (k + 1) / 15)
        if inside.any():
            gap = case.predictions.right[inside].mean() - confidence[inside].mean()
            by_hand += inside.mean() * abs(gap)
    assert found.calibration_error == pytest.approx(by_hand)
    assert sum(b.count for b in found.bins) == len(confidence)
    assert found.overconfidence == pytest.approx(confidence.mean() - found.accuracy.value)


def test_the_mistakes_are_the_most_confident_ones(case: SimpleNamespace) -> None:
    predictions: Predictions = case.predictions
    wrong = np.flatnonzero(~predictions.right)
    expected = wrong[np.argsort(-predictions.confidence[wrong], kind="stable")][:MISTAKES]
    assert [m.number for m in predictions.mistakes] == expected.tolist()
    for mistake in predictions.mistakes:
        assert torch.equal(mistake.inputs["x"], case.probabilities[mistake.number])
        assert mistake.actual_probability == pytest.approx(float(case.probabilities[mistake.number, mistake.actual]))


def test_a_classifier_without_mistakes_and_classes_without_samples() -> None:
    predictions = observed(torch.eye(4)[[0, 1, 1]], torch.tensor([0, 1, 1]), ("a", "b", "c", "d")).predictions()
    assert predictions is not None
    found = classify(predictions)
    assert predictions.mistakes == ()
    assert found.accuracy.value == 1.0
    assert found.confusions == ()
    assert found.nll.value == 0.0
    assert [(s.support, s.recall is None, s.f1) for s in found.classes[2:]] == [(0, True, None)] * 2


def test_classes_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(TaskError, match="classes 0 to 4, but 'p' has 3 columns"):
        observed(torch.eye(3)[[0, 1]], torch.tensor([0, 4]))


@pytest.mark.parametrize("ties", [False, True])
def test_the_areas_under_the_curves_are_scikit_learns(ties: bool) -> None:
    generator = np.random.default_rng(3)
    positive = generator.random(3000) < 0.2
    scores = np.clip(0.3 * generator.standard_normal(3000) + 0.3 * positive + 0.4, 0, 1)
    scores = scores.round(1) if ties else scores
    ranking = rank(scores, positive)
    assert ranking is not None
    assert ranking.auc == pytest.approx(roc_auc_score(positive, scores))
    assert ranking.average_precision == pytest.approx(average_precision_score(positive, scores))
    # What is drawn has few points, and nearly the same area.
    assert len(ranking.recall) <= 201
    assert np.trapezoid(ranking.recall, ranking.false_positive_rate) == pytest.approx(ranking.auc, abs=0.003)
    assert (ranking.recall[-1], ranking.false_positive_rate[-1]) == (1.0, 1.0)
    assert rank(scores, np.ones(3000, dtype=bool)) is None
    assert rank(np.full(3000, np.nan), positive) is None


def test_each_of_a_few_classes_has_its_curves() -> None:
    few, many = (made(400, classes) for classes in (3, 21))
    for number, score in enumerate(classify(few.predictions).classes):
        expected = roc_auc_score(few.actual == number, few.probabilities[:, number])
        assert score.ranking is not None
        assert score.ranking.auc == pytest.approx(expected)
    assert all(score.ranking is None for score in classify(many.predictions).classes)


def test_a_regressions_largest_errors_and_slices() -> None:
    region = torch.arange(200) % 4
    actual = torch.arange(200) / 4
    predicted = actual + torch.where(region == 2, 5.0, 0.5)
    predicted[7] = torch.inf
    inference = InferenceSignature(
        module=torch.nn.Identity(),
        inputs={"region": TensorSpec(dtype="int64"), "pixels": TensorSpec(dtype="float32", shape=(2,))},
        outputs={"y": TensorSpec(dtype="float32", shape=(1,))},
    )
    object.__setattr__(inference, "module", lambda region, pixels: {"y": pixels[:, :1]})

    class Value(Task):
        def inference_batch(self, batch: Any) -> Any:
            return batch[:2], batch[2]

    observer = EvaluationRecorder(Value(), inference)
    for number, start in enumerate(range(0, 200, 64)):
        at = slice(start, start + 64)
        part = [region[at], torch.stack([predicted[at], predicted[at]], 1), actual[at, None]]
        observer(MicroBatch(number, part, len(part[0]), 0), {})
    assert observer.predictions() is None
    values = observer.regression()
    assert values is not None
    assert values.columns.keys() == {"region"}
    assert [miss.number for miss in values.misses] == [7, *range(2, 2 + 4 * (MISTAKES - 1), 4)]
    assert values.misses[1].inputs["region"] == 2
    finite = replace(values, actual=values.actual[8:], predicted=values.predicted[8:])
    result = regress(replace(finite, columns={"region": Column(values.columns["region"].cells[8:])}))
    assert (result.slices[0].column, result.slices[0].text, result.slices[0].samples) == ("region", "2", 48)
    assert result.slices[0].mae.value == pytest.approx(5.0)
    assert result.bias.value == pytest.approx((5.0 + 3 * 0.5) / 4)
    assert result.rmse.value == pytest.approx(((25 + 3 * 0.25) / 4) ** 0.5)
    assert result.r2 == pytest.approx(1 - (25 + 3 * 0.25) / 4 / float(np.var(finite.actual)))
    regress(values)  # also with an infinite error


def test_a_tables_rows_have_their_names_categories_and_texts() -> None:
    city = Categories({"Bern": 0, "Basel ": 1, "St. Gallen, SG": 2}, unknown=3, missing=4)
    review = Vocabulary.observe(["A good room, quiet."], max_length=8, lowercase=True)
    built = Dates(("month", "weekday"), missing=True)
    inputs = {
        "numbers": TensorSpec(
            dtype="float32", shape=(2,), columns={"age": "years", "income": "kCHF"}, allow_missing=True
        ),
        "city": TensorSpec(dtype="int64", encoding=city),
        "review": TensorSpec(dtype="int64", shape=review.shape, encoding=review),
        "built": TensorSpec(dtype="int64", shape=built.shape, encoding=built),
    }
    inference = InferenceSignature(
        module=torch.nn.Identity(), inputs=inputs, outputs={"rent": TensorSpec(dtype="float32", unit="CHF")}
    )
    object.__setattr__(inference, "module", lambda numbers, city, review, built: {"rent": numbers[:, :1].nan_to_num()})

    class Rent(Task):
        def inference_batch(self, batch: Any) -> Any:
            return batch[:4], batch[4]

    samples = 40
    numbers = torch.tensor([[30.0, 73683.0], [torch.nan, 5.5]]).repeat(samples // 2, 1)
    codes = torch.arange(samples) % 5
    texts = torch.from_numpy(review.encode(["a good room, quiet."] * samples))
    dates = torch.from_numpy(built.encode(["2026-01-31", "2026-05-04", None, "2026-05-04"] * (samples // 4)))
    actual = torch.where(codes == 1, 1000.0, 0.0)
    observer = EvaluationRecorder(Rent(), inference)
    observer(MicroBatch(0, [numbers, codes, texts, dates, actual], samples, 0), {})
    values = observer.regression()
    assert values is not None
    assert values.unit == "CHF"
    slices = {(part.column, part.text): part.samples for part in regress(values).slices}
    assert slices["city", "'Basel '"] == samples // 5, "what cannot be seen at its end is in quotes"
    assert {text for column, text in slices if column == "city"} == {
        *("Bern", "'Basel '", "'St. Gallen, SG'", "unknown", "(missing)")
    }
    assert slices["age", "(missing)"] == slices["age", "30"] == samples // 2
    assert slices["built: weekday", "0"] == samples // 2, "Mondays"
    assert slices["built: month", "(missing)"] == samples // 4
    assert ("built: weekday", "(missing)") not in slices, "which is the same"
    assert not any(column == "review" for column, _ in slices)
    assert columns_of(values.misses, values.inputs) == ["age", "income", "city", "review", "built"]
    cells = {name: cell.text for name, cell in cells_of(values.misses[0], values.inputs).items()}
    assert cells["city"] == "'Basel '"
    assert cells["review"] == "a good room, quiet."
    assert (cells["age"], cells["income"]) in {("30", "73,683"), ("–", "5.5")}
    assert show(codes[1], inputs["city"]).text == "'Basel '"


def test_long_inputs_are_no_columns() -> None:
    inputs = {"pixels": TensorSpec(dtype="float32", shape=(17,)), "kind": TensorSpec(dtype="int64")}
    miss = LargeError(0, 1.0, 2.0, {"pixels": torch.zeros(17), "kind": torch.tensor(3)})
    assert columns_of([miss], inputs) == []
    assert columns_of([], inputs) == []
    few = {**inputs, "pixels": TensorSpec(dtype="float32", shape=(1,))}
    assert columns_of([replace(miss, inputs={**miss.inputs, "pixels": torch.zeros(1)})], few) == ["pixels[0]", "kind"]
    wrong = {**inputs, "pixels": TensorSpec(dtype="float32", shape=(2,), columns={"age": "", "income": ""})}
    three = replace(miss, inputs={**miss.inputs, "pixels": torch.zeros(3)})
    assert columns_of([three], wrong) == ["pixels[0]", "pixels[1]", "pixels[2]", "kind"], "a signature may be wrong"
