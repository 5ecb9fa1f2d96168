"""SeqIO's preprocessors that only trim or append an end token, on whole batches in numpy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import seqio

from anystep.examples import Batch, Ragged
from anystep.manifest import Feature

# What `seqio.map_over_dataset` makes of a function has the same code, whatever the function.
_MAPPED_CODE = seqio.preprocessors.truncate_inputs_left.__code__


class _Edit(NamedTuple):
  """A change of each sequence of a feature: its `first` or `last` tokens are kept, or a token is appended."""

  feature: str
  kind: str
  value: Any


class NativePreprocessors:
  """Preprocessors that are understood, with the results that SeqIO has and without TensorFlow.

  Made by `NativePreprocessors.of`.

  Attributes:
    appended_tokens: as that of `anystep.transforms.Transform`.
  """

  def __init__(self, edits: Sequence[_Edit], appended_tokens: Mapping[str, int] | None):
    self._edits = edits
    self.appended_tokens = appended_tokens

  @classmethod
  def of(
    cls,
    preprocessors: Sequence[Callable],
    features: Mapping[str, Feature],
    output_features: Mapping[str, seqio.Feature],
    feature_lengths: Mapping[str, int],
  ) -> NativePreprocessors | None:
    """The preprocessors where each is understood, and sure to work on the features; else None.

    Args:
      preprocessors: as `seqio.Task` takes them.
      features: those of the examples that they are given.
      output_features: the task's.
      feature_lengths: what SeqIO calls `sequence_length`.
    """
    edits: list[_Edit] = []
    for preprocessor in preprocessors:
      own = _edits_of(preprocessor, features, output_features, feature_lengths)
      if own is None or not all(_works(edit, features.get(edit.feature)) for edit in own):
        return None
      edits += own
    return cls(edits, _appended_tokens(edits, features, feature_lengths))

  def __call__(self, batch: Batch) -> dict[str, Ragged | np.ndarray]:
    """The preprocessed examples; what is not changed is not copied."""
    edited = dict(batch)
    for name, kind, value in self._edits:
      feature = edited[name]
      assert isinstance(feature, Ragged)
      edited[name] = _appended(feature, value) if kind == "append" else _cut(feature, kind, value)
    return edited


def _edits_of(
  preprocessor: Callable,
  features: Mapping[str, Feature],
  output_features: Mapping[str, seqio.Feature],
  feature_lengths: Mapping[str, int],
) -> list[_Edit] | None:
  """What a preprocessor does, None where it is not known."""
  bound: dict[str, Any] = {}
  if isinstance(preprocessor, functools.partial):
    if preprocessor.args or preprocessor.keywords.keys() - {"sequence_length", "output_features"}:
      return None
    bound = preprocessor.keywords
    preprocessor = preprocessor.func
  # What a partial binds, SeqIO does not give anew.
  outputs = bound.get("output_features", output_features)
  lengths = bound.get("sequence_length", feature_lengths)
  lengths = {} if lengths is None else lengths
  if not isinstance(outputs, Mapping) or not isinstance(lengths, Mapping):
    return None
  limited = [name for name in features if name in outputs and lengths.get(name) is not None]
  if any(type(lengths[name]) is not int for name in limited):
    return None
  ended = [name for name in features if name in outputs and outputs[name].add_eos]
  appends = [_Edit(name, "append", outputs[name].vocabulary.eos_id) for name in ended]
  # A function that SeqIO's decorator maps is not the same as one of a whole dataset.
  mapped = getattr(preprocessor, "__code__", None) is _MAPPED_CODE
  decorated = getattr(preprocessor, "__wrapped__", None) if mapped else None
  if preprocessor is seqio.preprocessors.append_eos:
    return appends
  if (
    preprocessor is seqio.preprocessors.append_eos_after_trim
    or decorated is seqio.preprocessors.append_eos_after_trim_impl
  ):
    return [_Edit(name, "first", lengths[name] - 1) for name in limited if name in ended] + appends
  if preprocessor is seqio.utils.trim_dataset:
    return [_Edit(name, "first", lengths[name]) for name in limited]
  if preprocessor is seqio.preprocessors.truncate_inputs_left and "output_features" not in bound:
    return [_Edit("inputs", "last", lengths["inputs"])] if "inputs" in lengths else []
  return None


def _works(edit: _Edit, feature: Feature | None) -> bool:
  """Whether SeqIO would not refuse the edit, nor take it for something else, such as a cut from the end."""
  if feature is None or not feature.sequence or type(edit.value) is not int:
    return False
  if edit.kind != "append":
    return edit.value >= (1 if edit.kind == "last" else 0)
  if len(feature.shape) > 1 or feature.dtype == "string":
    return False
  dtype = np.dtype(feature.dtype)
  if dtype.kind == "f":
    return True
  return dtype.kind in "iu" and np.iinfo(dtype).min <= edit.value <= np.iinfo(dtype).max


def _appended_tokens(
  edits: Sequence[_Edit], features: Mapping[str, Feature], feature_lengths: Mapping[str, int]
) -> dict[str, int] | None:
  """By sequence, how many tokens are appended; None where one is cut to less than its feature length."""
  appended = {name: 0 for name, feature in features.items() if feature.sequence}
  longest = dict.fromkeys(appended, math.inf)
  for name, kind, value in edits:
    appended[name] += kind == "append"
    longest[name] = longest[name] + 1 if kind == "append" else min(longest[name], value)
  cut = any(longest[name] < length for name, length in feature_lengths.items() if name in longest)
  return None if cut else appended


def _cut(feature: Ragged, kind: str, limit: int) -> Ragged:
  lengths = np.minimum(feature.lengths, limit)
  if (lengths == feature.lengths).all():
    return feature
  places = np.arange(len(feature.values))
  starts = np.cumsum(feature.lengths) - feature.lengths
  starts += feature.lengths - lengths if kind == "last" else 0
  starts = np.repeat(starts, feature.lengths)
  kept = (places >= starts) & (places < starts + limit)
  return Ragged(feature.values[kept], lengths)


def _appended(feature: Ragged, token: int) -> Ragged:
  lengths = feature.lengths + 1
  values = np.full(int(lengths.sum()), token, feature.values.dtype)
  old = np.ones(len(values), bool)
  old[np.cumsum(lengths) - 1] = False
  values[old] = feature.values
  return Ragged(values, lengths)
