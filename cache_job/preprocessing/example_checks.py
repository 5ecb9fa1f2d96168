"""What records can hold of examples, checked for every one of them."""

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
# What SeqIO's reader can parse of a cache.
STOCK_DTYPES = ("bool", "float32", "int32", "int64", "string")

# SeqIO's copies of a text beside its tokens end so.
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
  """What is wrong with an example: a kind of error, of which feature, what was expected and what came."""

  kind: str
  feature: str
  expected: str
  got: str


def static_features(element_spec: Any, task: str) -> dict[str, Feature] | None:
  """What a tf.data dataset's elements hold, as a manifest says it and as far as TensorFlow knows.

  Returns:
    None where a feature's rank, or the size of another axis than its first, is known of examples alone.

  Raises:
    AnystepError: 78 `feature_form` for what records cannot hold.
  """
  if not isinstance(element_spec, dict):
    raise _wrong_form(task, "", "a dictionary of features", element_spec)
  held = held_features(element_spec)
  features: dict[str, Feature | None] = {}
  for name, spec in element_spec.items():
    if name not in held:
      expected = "tensors of numbers, bools or strings, or such ragged in their second dimension"
      raise _wrong_form(task, name, expected, spec)
    features[name] = _static_feature(spec)
  known = {name: feature for name, feature in features.items() if feature is not None}
  return known if len(known) == len(features) else None


def held_features(element_spec: Any) -> list[str]:
  """The features of a tf.data dataset's elements whose dtypes and forms records can hold."""
  import tensorflow as tf

  def is_held(spec: Any) -> bool:
    is_ragged = isinstance(spec, tf.RaggedTensorSpec) and spec.ragged_rank == 1
    return (is_ragged or isinstance(spec, tf.TensorSpec)) and spec.dtype.name in _DTYPES

  if not isinstance(element_spec, dict):
    return []
  return [name for name, spec in element_spec.items() if is_held(spec)]


def known_features(element_spec: Any, task: str) -> dict[str, Feature]:
  """As `static_features`, where nobody looks at examples.

  Raises:
    AnystepError: 78 `feature_form`, also for what is known of examples alone.
  """
  features = static_features(element_spec, task)
  if features is None:
    raise _wrong_form(task, "", "tensors whose first dimension alone varies", element_spec)
  return features


def features_of(batch: Batch) -> dict[str, Feature]:
  """What a batch's examples hold, as a manifest says it."""
  return {name: _feature_of(feature) for name, feature in batch.items()}


def form_problems(found: Mapping[str, Feature], expected: Mapping[str, Feature]) -> list[Problem]:
  """The features of an example that are not those of the others, in their forms."""
  return [
    Problem(
      kind="feature_form_varies",
      feature=name,
      expected=_shown(expected.get(name)),
      got=_shown(found.get(name)),
    )
    for name in sorted({*found, *expected})
    if found.get(name) != expected.get(name)
  ]


def check_output_features(task: Any, features: Mapping[str, Feature]) -> None:
  """Refuses examples that are not the task's own output, where no preprocessor comes after the cache.

  Raises:
    AnystepError: 78 `output_feature`.
  """
  for name, feature in task.output_features.items():
    found = features.get(name)
    if found is None and not feature.required:
      continue
    expected = f"{feature.dtype.name} of rank {feature.rank}"
    got = "none" if found is None else f"{found.dtype} of rank {len(found.shape)}"
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


def text_features(task: Any, features: Mapping[str, Feature]) -> list[str]:
  """The features that must be UTF-8: output features of strings, and SeqIO's copies of tokenized texts."""
  return sorted(
    name
    for name, feature in features.items()
    if feature.dtype == "string" and (name in task.output_features or name.endswith(_TEXT_SUFFIX))
  )


def problems(batch: Batch, *, texts: Sequence[str]) -> dict[int, Problem]:
  """What is wrong with which rows of a batch.

  Args:
    batch: examples.
    texts: the features that must be UTF-8.
  """
  found: dict[int, Problem] = {}
  for name, feature in batch.items():
    for row, problem in _feature_problems(name, feature, is_text=name in texts):
      found.setdefault(row, problem)
  return found


def size_problem(record_bytes: int) -> Problem:
  """What is wrong with a record that is too large."""
  return Problem(
    kind=TOO_LARGE,
    feature="",
    expected=f"at most {MAX_RECORD_BYTES:,} bytes",
    got=f"{record_bytes:,} bytes",
  )


def _wrong_form(task: str, feature: str, expected: str, spec: Any) -> AnystepError:
  return AnystepError(
    ExitCode.CONFIG,
    "feature_form",
    task=task,
    feature=feature,
    expected=expected,
    got=str(spec),
    fix="flatten the feature before the cache and restore its form after it",
  )


def _feature_problems(name: str, feature: Any, *, is_text: bool) -> Iterator[tuple[int, Problem]]:
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
  for place in np.flatnonzero(wrong).tolist():
    got = repr(values[place : place + 1].tolist()[0])[:_SHOWN_CHARACTERS]
    yield _row_of(feature, place), Problem(kind=kind, feature=name, expected=expected, got=got)


def _row_of(feature: Any, place: int) -> int:
  """The row of a feature that its flat value at a place belongs to."""
  if not isinstance(feature, Ragged):
    return place
  if isinstance(feature.values, Ragged):
    place = _row_of(feature.values, place)
  return int(np.searchsorted(np.cumsum(feature.lengths), place, side="right"))


def _is_utf8(text: bytes) -> bool:
  try:
    text.decode()
  except UnicodeDecodeError:
    return False
  return True


def _static_feature(spec: Any) -> Feature | None:
  if spec.shape.rank is None:
    return None
  shape = spec.shape.as_list()
  outer = 2 if hasattr(spec, "ragged_rank") else min(1, len(shape))
  if None in shape[outer:]:
    return None
  return Feature(dtype=spec.dtype.name, shape=(*[None] * outer, *shape[outer:]))


def _feature_of(feature: Ragged | np.ndarray) -> Feature:
  if not isinstance(feature, Ragged):
    return Feature(dtype=_dtype_name(feature), shape=())
  if isinstance(feature.values, Ragged):
    values = feature.values.values
    return Feature(dtype=_dtype_name(values), shape=(None, None, *values.shape[1:]))
  return Feature(dtype=_dtype_name(feature.values), shape=(None, *feature.values.shape[1:]))


def _dtype_name(array: np.ndarray) -> str:
  return "string" if array.dtype.hasobject else array.dtype.name


def _shown(feature: Feature | None) -> str:
  return "none" if feature is None else f"{feature.dtype}{list(feature.shape)}"
