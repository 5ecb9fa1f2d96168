"""Preprocessors that trim, append an end token or corrupt spans, on whole batches without TensorFlow."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import seqio

from anystep.features.feature import Feature
from anystep.features.ragged import Batch, Ragged
from anystep.tasks.preprocessors import lm, random_chunk, span_corruption, span_corruption_chunk
from anystep.tasks.reading.span_corruption import corrupt_spans, count_noise, cut_random_chunks

# What `seqio.map_over_dataset` makes of a function has the same code, whatever the function.
_MAPPED_CODE = seqio.preprocessors.truncate_inputs_left.__code__


class _Edit(NamedTuple):
  """A change of each sequence of a feature: its `first` or `last` tokens are kept, or a token is appended."""

  feature: str
  kind: str
  value: Any


class _Draw(NamedTuple):
  """A random preprocessor.

  Attributes:
    num_seeds: number of its seed pairs.
    outputs: the features that it makes.
    run: makes them from a batch and seeds, `(rows, num_seeds, 2) int64`.
    chunked: the feature of which it takes a chunk.
    chunk_tokens: length of the longest chunk.
  """

  num_seeds: int
  outputs: Mapping[str, Feature]
  run: Callable[[Batch, np.ndarray], Batch]
  chunked: str
  chunk_tokens: int


class NativePreprocessors:
  """Known preprocessors, run without TensorFlow and with SeqIO's results.

  Made by `NativePreprocessors.of`.

  Attributes:
    features: features of the preprocessed examples.
    num_seeds: number of seed pairs of each preprocessor.
    appended_tokens: as that of `anystep.transforms.Transform`.
  """

  def __init__(
    self,
    steps: Sequence[_Draw | Sequence[_Edit]],
    features: Mapping[str, Feature],
    appended_tokens: Mapping[str, int] | None,
  ):
    self._steps = steps
    self.features = features
    self.num_seeds = [step.num_seeds if isinstance(step, _Draw) else 0 for step in steps]
    self.appended_tokens = appended_tokens

  @classmethod
  def of(
    cls,
    preprocessors: Sequence[Callable],
    features: Mapping[str, Feature],
    output_features: Mapping[str, seqio.Feature],
    feature_lengths: Mapping[str, int],
  ) -> NativePreprocessors | None:
    """Return the preprocessors if each is known and works on the features; else None.

    Args:
      preprocessors: as `seqio.Task` takes them.
      features: features of the cached examples.
      output_features: the task's output features.
      feature_lengths: SeqIO's `sequence_length`.

    Raises:
      AnystepError: 78 `feature_length`, as `span_corruption` does.
    """
    steps: list[_Draw | Sequence[_Edit]] = []
    results = dict(features)
    for preprocessor in preprocessors:
      step = _recognize(preprocessor, results, output_features, feature_lengths)
      if isinstance(step, _Draw):
        results.update(step.outputs)
      elif step is None or not all(_is_exact(edit, results.get(edit.feature)) for edit in step):
        return None
      steps.append(step)
    edits = [edit for step in steps if not isinstance(step, _Draw) for edit in step]
    is_random = any(isinstance(step, _Draw) for step in steps)
    return cls(steps, results, None if is_random else _count_appended(edits, results, feature_lengths))

  def __call__(self, batch: Batch, seeds: Mapping[str, np.ndarray]) -> dict[str, Ragged | np.ndarray]:
    """Preprocess examples; unchanged features are not copied.

    Args:
      batch: the examples.
      seeds: seed pairs by the position, as text, of a random preprocessor: `(rows, pairs, 2) int64`.
    """
    result = dict(batch)
    for position, step in enumerate(self._steps):
      if isinstance(step, _Draw):
        result.update(step.run(result, seeds[str(position)]))
        continue
      for name, kind, value in step:
        feature = result[name]
        assert isinstance(feature, Ragged)
        result[name] = _append(feature, value) if kind == "append" else _trim(feature, kind, value)
    return result

  def count_cut_tokens(self, batch: Batch, seeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the number of tokens that are cut off each example, `(rows,) int64`; arguments as for a call."""
    cut_tokens: Any = 0
    result = dict(batch)
    for position, step in enumerate(self._steps):
      if isinstance(step, _Draw):
        cut_tokens = cut_tokens + _count_beyond(result[step.chunked], step.chunk_tokens)
        result.update(step.run(result, seeds[str(position)]))
        continue
      for name, kind, value in step:
        feature = result[name]
        assert isinstance(feature, Ragged)
        if kind == "append":
          result[name] = _append(feature, value)
        else:
          cut_tokens = cut_tokens + _count_beyond(feature, value)
          result[name] = _trim(feature, kind, value)
    return cut_tokens + np.zeros(len(next(iter(batch.values()))), np.int64)


def _recognize(
  preprocessor: Callable,
  features: Mapping[str, Feature],
  output_features: Mapping[str, seqio.Feature],
  feature_lengths: Mapping[str, int],
) -> _Draw | list[_Edit] | None:
  """Return a preprocessor's step; None if the preprocessor is not known."""
  bound: dict[str, Any] = {}
  if isinstance(preprocessor, functools.partial):
    if preprocessor.args:
      return None
    bound = preprocessor.keywords
    preprocessor = preprocessor.func
  # What a partial binds, SeqIO does not give anew.
  outputs = bound.get("output_features", output_features)
  lengths = bound.get("sequence_length", feature_lengths)
  lengths = {} if lengths is None else lengths
  if not isinstance(outputs, Mapping) or not isinstance(lengths, Mapping):
    return None
  options = {
    name: value for name, value in bound.items() if name not in ("sequence_length", "output_features")
  }
  if preprocessor is span_corruption and not options.keys() - {"noise_density", "mean_span_tokens"}:
    return _make_span_step(features, outputs, lengths, **options)
  if preprocessor is random_chunk and not options.keys() - {"feature"} and "output_features" not in bound:
    return _make_chunk_step(features, lengths, **options)
  if preprocessor is lm and not bound and "inputs" not in outputs:
    return _make_chunk_step(features, lengths)
  if options:
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


def _make_chunk_step(
  features: Mapping[str, Feature], lengths: Mapping[str, int], *, feature: str = "targets"
) -> _Draw | None:
  chunked = features.get(feature)
  length = lengths.get(feature)
  if chunked is None or len(chunked.shape) != 1 or type(length) is not int or length < 0:
    return None
  results = {feature: Feature(dtype=chunked.dtype, shape=(None,))}
  run = functools.partial(_cut_chunks, name=feature, length=length)
  return _Draw(1, results, run, feature, length)


def _cut_chunks(batch: Batch, seeds: np.ndarray, *, name: str, length: int) -> Batch:
  feature = batch[name]
  assert isinstance(feature, Ragged)
  return {name: cut_random_chunks(feature, length, seeds)}


def _make_span_step(
  features: Mapping[str, Feature],
  output_features: Mapping[str, seqio.Feature],
  lengths: Mapping[str, int],
  *,
  noise_density: float = 0.15,
  mean_span_tokens: float = 3.0,
) -> _Draw | None:
  """Return the step of `span_corruption`; None also if the preprocessor itself must raise its error.

  Raises:
    AnystepError: 78 `feature_length`, as the preprocessor does.
  """
  names = ("inputs", "targets")
  corrupted = features.get("targets")
  if corrupted is None or corrupted.dtype not in ("int32", "int64") or len(corrupted.shape) != 1:
    return None
  if any(name not in output_features or type(lengths.get(name)) is not int for name in names):
    return None
  if not all(isinstance(value, int | float) for value in (noise_density, mean_span_tokens)):
    return None
  # Outside these bounds there are more spans than corrupted tokens, or numbers that only TensorFlow knows.
  if not (0 < noise_density < 1 <= mean_span_tokens):
    return None
  room = [lengths[name] - int(output_features[name].add_eos) for name in names]
  chunk_tokens = span_corruption_chunk(*room, noise_density=noise_density, mean_span_tokens=mean_span_tokens)
  counts = count_noise(chunk_tokens, noise_density=noise_density, mean_span_tokens=mean_span_tokens)
  vocabulary = output_features["inputs"].vocabulary
  if counts[-1, 1] > (vocabulary.extra_ids or 0) or vocabulary.vocab_size > np.iinfo(corrupted.dtype).max:
    return None
  results = dict.fromkeys(names, Feature(dtype=corrupted.dtype, shape=(None,)))
  run = functools.partial(_corrupt, counts=counts, first_sentinel=vocabulary.vocab_size - 1)
  return _Draw(3, results, run, "targets", chunk_tokens)


def _corrupt(batch: Batch, seeds: np.ndarray, *, counts: np.ndarray, first_sentinel: int) -> Batch:
  feature = batch["targets"]
  assert isinstance(feature, Ragged)
  inputs, targets = corrupt_spans(feature, counts, seeds, first_sentinel=first_sentinel)
  return {"inputs": inputs, "targets": targets}


def _is_exact(edit: _Edit, feature: Feature | None) -> bool:
  """Return whether SeqIO makes exactly this edit: some it refuses, and some it takes for other cuts."""
  if feature is None or not feature.sequence or feature.ragged or type(edit.value) is not int:
    return False
  if edit.kind != "append":
    return edit.value >= (1 if edit.kind == "last" else 0)
  if len(feature.shape) > 1 or feature.dtype == "string":
    return False
  dtype = np.dtype(feature.dtype)
  if dtype.kind == "f":
    return True
  return dtype.kind in "iu" and np.iinfo(dtype).min <= edit.value <= np.iinfo(dtype).max


def _count_appended(
  edits: Sequence[_Edit], features: Mapping[str, Feature], feature_lengths: Mapping[str, int]
) -> dict[str, int] | None:
  """Count appended tokens by sequence; return None if one is cut to less than its feature length."""
  appended = {name: 0 for name, feature in features.items() if feature.sequence}
  longest = dict.fromkeys(appended, math.inf)
  for name, kind, value in edits:
    appended[name] += kind == "append"
    longest[name] = longest[name] + 1 if kind == "append" else min(longest[name], value)
  cut = any(longest[name] < length for name, length in feature_lengths.items() if name in longest)
  return None if cut else appended


def _count_beyond(feature: Ragged | np.ndarray, limit: int) -> np.ndarray:
  """Return the number of each sequence's tokens beyond a length, `(rows,) int64`."""
  assert isinstance(feature, Ragged)
  return np.maximum(feature.lengths - limit, 0)


def _trim(feature: Ragged, kind: str, limit: int) -> Ragged:
  lengths = np.minimum(feature.lengths, limit)
  if (lengths == feature.lengths).all():
    return feature
  if kind == "first":
    return Ragged(_copy_first(feature, lengths, np.cumsum(lengths) - lengths), lengths)
  positions = np.arange(len(feature.values))
  starts = np.repeat(np.cumsum(feature.lengths) - lengths, feature.lengths)
  return Ragged(feature.values[(positions >= starts) & (positions < starts + limit)], lengths)


def _append(feature: Ragged, token: int) -> Ragged:
  lengths = feature.lengths + 1
  ends = np.cumsum(lengths) - 1
  values = _copy_first(feature, feature.lengths, ends - feature.lengths, total=int(lengths.sum()))
  values[ends] = token
  return Ragged(values, lengths)


def _copy_first(
  feature: Ragged, lengths: np.ndarray, starts: np.ndarray, *, total: int | None = None
) -> np.ndarray:
  """Copy the first `lengths` tokens of each sequence to a new array, from `starts` on."""
  size = int(lengths.sum()) if total is None else total
  values = np.empty((1, size, *feature.values.shape[1:]), feature.values.dtype)
  feature.write(values, rows=np.zeros(len(lengths), np.int64), starts=starts, lengths=lengths)
  return values[0]
