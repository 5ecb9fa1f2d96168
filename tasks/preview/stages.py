"""Stages of examples after each step: features, changes, cuts, and the model's features."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from anystep.features.converter_names import CONVERTERS, task_feature_of
from anystep.features.ragged import Ragged
from anystep.order.packing import PackingPolicy, pack
from anystep.tasks.preview.followed_examples import Followed, Following, StepFailed
from anystep.tasks.preview.values import Example, Stage, Value
from anystep.tasks.tensors import rows_from_tensors
from anystep.tasks.vocabularies.decoding import vocabularies

MODELS: Mapping[str, tuple[str, ...]] = {
  "encoder_decoder": ("inputs", "targets"),
  "decoder": ("targets",),
  "prefix_lm": ("inputs", "targets"),
  "lm": ("targets",),
  "maxtext": ("targets",),
  "pass_through": (),
}
"""The task's features that a model takes, by the model's name in `CONVERTERS`."""

_ARGUMENT_CHARACTERS = 60


class ShownStages:
  """Makes stages of what became of a task's followed examples, one after the other.

  Args:
    task: gives the vocabularies of its features.
  """

  def __init__(self, task: seqio.Task):
    self._vocabularies = vocabularies({task.name: task})[task.name]
    self._output_features = set(task.output_features)
    self._labels: list[str] = []
    self._features: list[dict[str, Value]] = []

  def source(self, source: seqio.DataSource, now: Following) -> Stage:
    """The source's own examples."""
    return Stage(
      kind="source", name=type(source).__name__, examples=self._make_examples(now), notes=now.notes
    )

  def step(self, preprocessor: Callable, now: Following) -> Stage:
    """A step, and the examples after it."""
    if isinstance(preprocessor, seqio.CacheDatasetPlaceholder):
      return Stage(kind="cache", name="cached above, at reading below")
    name, arguments = describe_step(preprocessor)
    num_given = len(self._labels)
    return Stage(
      kind="preprocessor",
      name=name,
      arguments=arguments,
      examples=self._make_examples(now),
      given=num_given,
      dropped=now.dropped,
      notes=now.notes,
    )

  def failed(self, preprocessor: Callable, failure: StepFailed) -> Stage:
    """A step that raised, and the example that it was given."""
    name, arguments = describe_step(preprocessor)
    failing = []
    if failure.example is not None:
      features = self._make_values(failure.example)
      label = failure.label or "that is not shown above"
      failing = [Example(label=label, features=features, changed=tuple(features))]
    return Stage(
      kind="preprocessor", name=name, arguments=arguments, examples=failing, problem=failure.message
    )

  def trim(self, feature_lengths: Mapping[str, int], *, joined: bool) -> Stage:
    """Return the stage at which examples are cut to the feature lengths.

    Args:
      feature_lengths: where features are cut.
      joined: whether inputs and targets are cut as one sequence.
    """
    examples = []
    for label, features in zip(self._labels, self._features, strict=True):
      named = {
        name: value
        for name, value in features.items()
        if name in self._output_features and name in feature_lengths and value.values.ndim
      }
      limits = dict(feature_lengths)
      if joined:
        limits["inputs"] = feature_lengths["inputs"] + feature_lengths["targets"]
        limits["targets"] = limits["inputs"] - min(len(named["inputs"].values), limits["inputs"])
      trimmed = {
        name: dataclasses.replace(value, kept=min(len(value.values), limits[name]))
        for name, value in named.items()
      }
      examples.append(Example(label=label, features=trimmed, changed=tuple(trimmed)))
    arguments = {name: str(length) for name, length in feature_lengths.items()}
    return Stage(kind="trimmed", name="cut to lengths", arguments=arguments, examples=examples)

  def model_rows(self, model: str, feature_lengths: Mapping[str, int], packing: PackingPolicy) -> Stage:
    """The model's features of the examples.

    Raises:
      AnystepError: as the converter does.
    """
    order, counts = self._pack(feature_lengths, packing)
    names = [name for name in self._features[0] if name in self._output_features]
    batch = {name: _stack_rows([self._features[k][name].values for k in order]) for name in names}
    converter = CONVERTERS[model]()
    rows = converter(batch, feature_lengths, counts)
    labels = [self._labels[k] for k in order]
    stops = np.cumsum(np.ones(len(order), np.int64) if counts is None else counts).tolist()
    examples = []
    for row, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
      features = {
        name: Value(
          values=feature.rows()[row] if isinstance(feature, Ragged) else np.asarray(feature[row]),
          vocabulary=self._vocabularies.get(task_feature_of(converter, name) or ""),
        )
        for name, feature in rows.items()
      }
      label = ", ".join(labels[start:stop])
      examples.append(Example(label=label, features=features, changed=tuple(features)))
    arguments = {} if packing == PackingPolicy.NONE else {"packing": str(packing)}
    notes = [] if counts is None else ["packs of the shown examples: a plan's have others beside them"]
    return Stage(
      kind="model", name=f"features of {model}", arguments=arguments, examples=examples, notes=notes
    )

  def _pack(
    self, feature_lengths: Mapping[str, int], packing: PackingPolicy
  ) -> tuple[list[int], np.ndarray | None]:
    """The examples in the order of the rows, and how many each row has; None where each is a row."""
    if packing == PackingPolicy.NONE:
      return list(range(len(self._features))), None
    names = [name for name in feature_lengths if name in self._features[0]]
    limits = [feature_lengths[name] for name in names]
    lengths = [
      [min(len(features[name].values), limit) for name, limit in zip(names, limits, strict=True)]
      for features in self._features
    ]
    starts, records = pack(np.array(lengths, np.int64), limits, packing)
    return records.tolist(), np.diff(starts)

  def _make_examples(self, now: Following) -> list[Example]:
    features_by_example = [self._make_values(now.examples[example.place]) for example in now.followed]
    examples = [
      self._make_example(example, features)
      for example, features in zip(now.followed, features_by_example, strict=True)
    ]
    self._labels, self._features = [example.label for example in now.followed], features_by_example
    return examples

  def _make_example(self, followed: Followed, features: dict[str, Value]) -> Example:
    before = {} if followed.parent is None else self._features[followed.parent]
    unchanged = [name for name, value in features.items() if name in before and _is_same(value, before[name])]
    return Example(
      label=followed.label,
      features=features,
      changed=[name for name in features if name not in unchanged],
      removed=[name for name in before if name not in features],
      siblings=followed.siblings,
    )

  def _make_values(self, example: Any) -> dict[str, Value]:
    return {
      name: Value(values=_to_array(tensor), vocabulary=self._vocabularies.get(name))
      for name, tensor in _flatten(example)
    }


def describe_step(preprocessor: Any) -> tuple[str, dict[str, str]]:
  """A preprocessor's name, and the arguments that are bound to it as text."""
  bound: dict[str, Any] = {}
  name = seqio.utils.function_name(preprocessor) or type(preprocessor).__name__
  if dataclasses.is_dataclass(preprocessor):
    fields = dataclasses.fields(preprocessor)
    bound = {field.name: getattr(preprocessor, field.name) for field in fields}
  while isinstance(preprocessor, functools.partial):
    bound = {
      **{f"argument {k}": value for k, value in enumerate(preprocessor.args)},
      **preprocessor.keywords,
      **bound,
    }
    preprocessor = preprocessor.func
  return name, {key: _format_argument(value) for key, value in bound.items()}


def _format_argument(value: Any) -> str:
  """A value as text in which nothing is another in another process."""
  if isinstance(value, (str, bytes, int, float, type(None))):
    text = repr(value)
  elif isinstance(value, Mapping):
    text = "{" + ", ".join(f"{key!r}: {_format_argument(item)}" for key, item in value.items()) + "}"
  elif isinstance(value, (list, tuple)):
    text = "[" + ", ".join(map(_format_argument, value)) + "]"
  else:
    text = getattr(value, "__name__", type(value).__name__)
  return text if len(text) <= _ARGUMENT_CHARACTERS else f"{text[:_ARGUMENT_CHARACTERS]}…"


def _flatten(element: Any, name: str = "") -> Iterator[tuple[str, Any]]:
  """An example's tensors with their names, which are paths where they lie in others."""
  if isinstance(element, Mapping):
    parts: Iterable[tuple[Any, Any]] = element.items()
  elif isinstance(element, (list, tuple)):
    parts = enumerate(element)
  else:
    yield name or "element", element
    return
  for key, part in parts:
    yield from _flatten(part, f"{name}/{key}" if name else str(key))


def _to_array(tensor: Any) -> np.ndarray | Ragged:
  if isinstance(tensor, tf.SparseTensor):
    tensor = tf.sparse.to_dense(tensor)
  # A text comes as Python's own bytes.
  value: Any = rows_from_tensors({"": tensor})[""]
  return np.array(value, object) if isinstance(value, bytes) else value


def _stack_rows(rows: Sequence[np.ndarray | Ragged]) -> Ragged | np.ndarray:
  """A feature of several examples."""
  if not rows[0].ndim:
    return np.array([np.asarray(row).item() for row in rows], rows[0].dtype)
  return Ragged.of_rows(rows, rows[0].dtype, rows[0].shape[1:])


def _is_same(one: Value, other: Value) -> bool:
  left, right = one.values, other.values
  if isinstance(left, Ragged) or isinstance(right, Ragged):
    return isinstance(left, Ragged) and isinstance(right, Ragged) and one.to_json() == other.to_json()
  if left.dtype != right.dtype or left.shape != right.shape:
    return False
  return left.tolist() == right.tolist() if left.dtype.hasobject else left.tobytes() == right.tobytes()
