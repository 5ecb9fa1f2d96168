"""Checks that records can hold an example, made for every example."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from anystep.errors import AnystepError, ExitCode
from anystep.features.feature import Feature
from anystep.features.ragged import Batch, Ragged

MAX_RECORD_BYTES = 64 << 20
TOO_LARGE = "record_too_large"
# Dtypes that SeqIO's reader can parse.
STOCK_DTYPES = ("bool", "float32", "int32", "int64", "string")

# SeqIO's copies of a text beside its tokens have names that end so.
_TEXT_SUFFIX = "_pretokenized"
_DTYPES = (
  *STOCK_DTYPES,
  "bfloat16",
  "float16",
  "float64",
  "int16",
  "int8",
  *(f"uint{n}" for n in (8, 16, 32, 64)),
)
_SHOWN_CHARACTERS = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
  """One problem of an example: a kind of error, the feature, the value expected and the value found."""

  kind: str
  feature: str
  expected: str
  got: str


def read_static_features(element_spec: Any, task: str) -> dict[str, Feature] | None:
  """Return the features of a tf.data dataset's elements, as far as TensorFlow knows them.

  Returns:
    None where a feature's rank, or the size of another axis than its first, is only known from examples.

  Raises:
    AnystepError: 78 `feature_form` for what records cannot hold.
  """
  if not isinstance(element_spec, dict):
    raise _make_form_error(task, "", "a dictionary of features", element_spec)
  held = list_held_features(element_spec)
  features: dict[str, Feature | None] = {}
  for name, spec in element_spec.items():
    if name not in held:
      expected = "tensors of numbers, bools or strings, or such ragged in their second dimension"
      raise _make_form_error(task, name, expected, spec)
    features[name] = _read_static_feature(spec)
  known = {name: feature for name, feature in features.items() if feature is not None}
  return known if len(known) == len(features) else None


def list_held_features(element_spec: Any) -> list[str]:
  """Return the features of a tf.data dataset's elements whose dtypes and forms records can hold."""
  import tensorflow as tf

  def is_held(spec: Any) -> bool:
    is_ragged = isinstance(spec, tf.RaggedTensorSpec) and spec.ragged_rank == 1
    return (is_ragged or isinstance(spec, tf.TensorSpec)) and spec.dtype.name in _DTYPES

  if not isinstance(element_spec, dict):
    return []
  return [name for name, spec in element_spec.items() if is_held(spec)]


def require_static_features(element_spec: Any, task: str) -> dict[str, Feature]:
  """Return features as `read_static_features`, where no example is read.

  Raises:
    AnystepError: 78 `feature_form`, also where only examples would tell.
  """
  features = read_static_features(element_spec, task)
  if features is None:
    raise _make_form_error(task, "", "tensors whose first dimension alone varies", element_spec)
  return features


def read_features(batch: Batch) -> dict[str, Feature]:
  """Return the features of a batch's examples, as a manifest has them."""
  return {name: _read_feature(feature) for name, feature in batch.items()}


def find_form_problems(found: Mapping[str, Feature], expected: Mapping[str, Feature]) -> list[Problem]:
  """Return the features of an example whose forms differ from those of the others."""
  return [
    Problem(
      kind="feature_form_varies",
      feature=name,
      expected=_format_feature(expected.get(name)),
      got=_format_feature(found.get(name)),
    )
    for name in sorted({*found, *expected})
    if found.get(name) != expected.get(name)
  ]


def check_output_features(task: Any, features: Mapping[str, Feature]) -> None:
  """Refuse examples that are not as the task's output features say.

  Raises:
    AnystepError: 78 `output_feature`.
  """
  for name, feature in task.output_features.items():
    actual = features.get(name)
    if actual is None and not feature.required:
      continue
    expected = f"{feature.dtype.name} of rank {feature.rank}"
    got = "none" if actual is None else f"{actual.dtype} of rank {len(actual.shape)}"
    if got != expected:
      raise AnystepError(
        ExitCode.CONFIG,
        "output_feature",
        task=task.name,
        feature=name,
        expected=expected,
        got=got,
        fix="mend the preprocessors or the task's output_features",
      )


def list_text_features(task: Any, features: Mapping[str, Feature]) -> list[str]:
  """Return the features that must be UTF-8: output features of strings, and SeqIO's copies of texts.

  A `seqio.ContinuousFeature` of strings holds bytes, such as a picture's.
  """
  import seqio

  texts = {
    name for name, feature in task.output_features.items() if not isinstance(feature, seqio.ContinuousFeature)
  }
  return sorted(
    name
    for name, feature in features.items()
    if feature.dtype == "string" and (name in texts or name.endswith(_TEXT_SUFFIX))
  )


def find_problems(batch: Batch, *, texts: Sequence[str]) -> dict[int, Problem]:
  """Return the first problem of each bad row of a batch.

  Args:
    batch: examples.
    texts: the features that must be UTF-8.
  """
  problem_of_row: dict[int, Problem] = {}
  for name, feature in batch.items():
    for row, problem in _find_feature_problems(name, feature, is_text=name in texts):
      problem_of_row.setdefault(row, problem)
  return problem_of_row


def make_size_problem(record_bytes: int) -> Problem:
  """Return the problem of a record that is too large."""
  return Problem(
    kind=TOO_LARGE,
    feature="",
    expected=f"at most {MAX_RECORD_BYTES:,} bytes",
    got=f"{record_bytes:,} bytes",
  )


def _make_form_error(task: str, feature: str, expected: str, spec: Any) -> AnystepError:
  return AnystepError(
    ExitCode.CONFIG,
    "feature_form",
    task=task,
    feature=feature,
    expected=expected,
    got=str(spec),
    fix="flatten the feature before the cache and restore its form after it",
  )


def _find_feature_problems(name: str, feature: Any, *, is_text: bool) -> Iterator[tuple[int, Problem]]:
  values = feature
  while isinstance(values, Ragged):
    values = values.values
  if values.dtype == np.float64:
    with np.errstate(over="ignore"):
      wrong = (values.astype(np.float32) != values) & ~np.isnan(values)
    expected, kind = "a value that float32 holds, which is what records have", "float64_inexact"
  elif values.dtype == np.uint64:
    wrong = values > np.iinfo(np.int64).max
    expected, kind = "a value that int64 holds, which is what records have", "integer_too_large"
  elif is_text and not _is_utf8(b"\n".join(values.reshape(-1))):
    wrong = np.array([not _is_utf8(text) for text in values.reshape(-1)]).reshape(values.shape)
    expected, kind = "UTF-8", "text_not_utf8"
  else:
    return
  wrong = wrong.any(axis=tuple(range(1, wrong.ndim)))
  for position in np.flatnonzero(wrong).tolist():
    got = repr(values[position : position + 1].tolist()[0])[:_SHOWN_CHARACTERS]
    yield _find_row(feature, position), Problem(kind=kind, feature=name, expected=expected, got=got)


def _find_row(feature: Any, position: int) -> int:
  """Return the row of a feature to which its flat value at a position belongs."""
  if not isinstance(feature, Ragged):
    return position
  if isinstance(feature.values, Ragged):
    position = _find_row(feature.values, position)
  return int(np.searchsorted(np.cumsum(feature.lengths), position, side="right"))


def _is_utf8(text: bytes) -> bool:
  try:
    text.decode()
  except UnicodeDecodeError:
    return False
  return True


def _read_static_feature(spec: Any) -> Feature | None:
  if spec.shape.rank is None:
    return None
  shape = spec.shape.as_list()
  outer = 2 if hasattr(spec, "ragged_rank") else min(1, len(shape))
  if None in shape[outer:]:
    return None
  return Feature(dtype=spec.dtype.name, shape=(*[None] * outer, *shape[outer:]))


def _read_feature(feature: Ragged | np.ndarray) -> Feature:
  if not isinstance(feature, Ragged):
    return Feature(dtype=_name_dtype(feature), shape=())
  if isinstance(feature.values, Ragged):
    values = feature.values.values
    return Feature(dtype=_name_dtype(values), shape=(None, None, *values.shape[1:]))
  return Feature(dtype=_name_dtype(feature.values), shape=(None, *feature.values.shape[1:]))


def _name_dtype(array: np.ndarray) -> str:
  return "string" if array.dtype.hasobject else array.dtype.name


def _format_feature(feature: Feature | None) -> str:
  return "none" if feature is None else f"{feature.dtype}{list(feature.shape)}"
