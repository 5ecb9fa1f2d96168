"""Metric functions."""

import math

import pytest

from anystep.tasks.metrics import bits_per_byte, edit_similarity, log_likelihood


@pytest.mark.parametrize(
  ("targets", "predictions", "expected"),
  [
    (["abc"], ["abc"], 1),
    (["abc"], ["xyz"], 0),
    (["abc"], [""], 0),
    ([""], [""], 1),
    (["kitten"], ["sitting"], 1 - 3 / 7),
    (["sitting"], ["kitten"], 1 - 3 / 7),
    (["üü"], ["üx"], 1 / 2),
    (["abcd", "x", "", "kitten"], ["abxd", "x", "y", "sitting"], (1 - 1 / 4 + 1 + 0 + 1 - 3 / 7) / 4),
  ],
)
def test_edit_similarity_is_the_mean_share_of_characters_kept(targets, predictions, expected):
  assert edit_similarity(targets, predictions) == {"edit_similarity": pytest.approx(expected)}


def test_edit_similarity_refuses_predictions_of_another_number():
  with pytest.raises(ValueError, match="shorter"):
    edit_similarity(["a", "b"], ["a"])


@pytest.mark.parametrize(("scores", "expected"), [([-2.0], -2), ([-2.0, -4.0, 0.0], -2)])
def test_log_likelihood_is_the_mean_score(scores, expected):
  assert log_likelihood(["x"] * len(scores), scores) == {"log_likelihood": pytest.approx(expected)}


@pytest.mark.parametrize(
  ("targets", "scores", "expected"),
  [
    (["a"], [-8 * math.log(2)], 8),
    (["abcd", ""], [-8 * math.log(2), -4 * math.log(2)], 3),
    (["é"], [-8 * math.log(2)], 4),
    (["abc"], [0.0], 0),
    ([""], [-math.log(2)], 1),
  ],
)
def test_bits_per_byte_divides_all_bits_by_the_bytes_of_the_texts(targets, scores, expected):
  assert bits_per_byte(targets, scores) == {"bits_per_byte": pytest.approx(expected)}
