"""Transforms that are plain Python functions: of an example, with or without draws, or of a batch."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from anystep.errors import AnystepError, ExitCode
from anystep.features.ragged import Batch, Ragged, select_rows
from anystep.transforms.identity import describe
from anystep.transforms.transform import REMAKE_TABLE, Records, Transform, random_keys

Example = dict[str, Any]
"""Features by name: numbers, bytes, texts, and arrays, which are copies that a function may change."""


@typing.final
class Map(Transform):
  """Transform that applies a function to each example.

  Results of rank 1 or more become `Ragged`, others an array of shape `(rows,)`; bytes and texts are objects.
  A batch without examples becomes a batch without features, because only the function tells their names.

  >>> scale = Map(lambda example: {"number": 2 * example["number"], "ones": np.ones(example["number"])})
  >>> records = Records(np.zeros(2, np.int64), np.arange(2), "demo", "train", 0)
  >>> batch = scale({"number": np.array([1, 2])}, records)
  >>> batch["number"], batch["ones"].lengths
  (array([2, 4]), array([1, 2]))

  Args:
    function: turns one example into another. Several threads call it, and worker processes get it by pickle,
      so it must be a function of a module, not a lambda.
    identity: JSON that identifies the function's effect; give another one when results change. The default
      has the function's name, source and captured values, but nothing of the functions that it calls.
  """

  def __init__(self, function: Callable[[Example], Mapping[str, Any]], *, identity: Any = None):
    self._function = function
    self._forms: _Forms = {}
    self.identity = _make_identity(self, function, identity)

  def __call__(self, batch: Batch, records: Records) -> Batch:
    """See `Transform`.

    Raises:
      AnystepError: 78 `transform_output` if a result is no example, or if the results for two examples have
        different features, or features of different dtypes, ranks or inner dimensions.
    """
    examples = _call_for_each(
      lambda example: _to_arrays(self._function(example)), records, _copy_examples(batch, records)
    )
    return _stack(examples, records, self._forms)


@typing.final
class RandomMap(Transform):
  """Transform that applies a function with random draws to each example; else as `Map`.

  Args:
    function: turns an example and a generator into an example. The generator is keyed by the plan's seed, the
      task, split, epoch, index and the transform's position. So an example's draws do not depend on where and
      with which other examples it is read, and they are new in each epoch.
    identity: as for `Map`.
  """

  is_random = True

  def __init__(
    self, function: Callable[[Example, np.random.Generator], Mapping[str, Any]], *, identity: Any = None
  ):
    self._function = function
    self._forms: _Forms = {}
    self.identity = _make_identity(self, function, identity)

  def __call__(self, batch: Batch, records: Records) -> Batch:
    """See `Map`."""
    generators = (np.random.Generator(np.random.Philox(key=key)) for key in random_keys(records))
    examples = _call_for_each(
      lambda example, rng: _to_arrays(self._function(example, rng)),
      records,
      _copy_examples(batch, records),
      generators,
    )
    return _stack(examples, records, self._forms)


@typing.final
class Filter(Transform):
  """Transform that keeps the examples for which a predicate is true.

  Args:
    predicate: returns whether an example is kept; its answer must depend on the example only.
    identity: as for `Map`.
  """

  may_drop = True

  def __init__(self, predicate: Callable[[Example], Any], *, identity: Any = None):
    self._predicate = predicate
    self.identity = _make_identity(self, predicate, identity)

  def __call__(self, batch: Batch, records: Records) -> Batch:
    """See `Transform`."""
    is_kept = self._call_predicate(batch, records)
    if not is_kept.all():
      row = int(np.argmin(is_kept))
      raise AnystepError(
        ExitCode.DATA,
        "example_dropped",
        **_locate(records, row),
        expected="an example that is kept, as the plan's unit table says",
        got="false from the filter's predicate",
        fix=f"{REMAKE_TABLE}; the predicate's answer must depend on the example only",
      )
    return batch

  def survey(self, batch: Batch, records: Records) -> tuple[Batch, np.ndarray]:
    """See `Transform`."""
    is_kept = self._call_predicate(batch, records)
    kept_batch = {name: select_rows(feature, is_kept) for name, feature in batch.items()}
    return kept_batch, np.flatnonzero(is_kept)

  def _call_predicate(self, batch: Batch, records: Records) -> np.ndarray:
    """Return the predicate's answers, `(rows,) bool`."""
    examples = _copy_examples(batch, records)
    return np.array(_call_for_each(lambda example: bool(self._predicate(example)), records, examples), bool)


@typing.final
class MapBatch(Transform):
  """Transform that applies a vectorised function to batches.

  The result has the same rows, and each row must depend only on its own example.

  Args:
    function: turns a batch, and the records of its rows, into a batch. A batch may have any number of rows,
      also none.
    identity: as for `Map`.
    is_random: whether the function draws; then its keys must be `anystep.transforms.random_keys(records)`.
  """

  def __init__(
    self, function: Callable[[Batch, Records], Batch], *, identity: Any = None, is_random: bool = False
  ):
    self._function = function
    self.identity = _make_identity(self, function, identity)
    self.is_random = is_random

  def __call__(self, batch: Batch, records: Records) -> Batch:
    """See `Transform`.

    Raises:
      AnystepError: 78 `transform_output` if the result is no batch, or a feature has a wrong number of rows.
    """
    result = self._function(batch, records)
    num_rows = len(records.indices)
    rows = _count_rows(result)
    if rows != dict.fromkeys(rows, num_rows):
      raise AnystepError(
        ExitCode.CONFIG,
        "transform_output",
        task=records.task,
        expected=f"Ragged and arrays by feature, of {num_rows} rows each",
        got={name: rows_or_type for name, rows_or_type in rows.items() if rows_or_type != num_rows},
        fix="let the function return a dict with as many rows as it is given, in their order",
      )
    return result


# A feature's dtype, rank and inner dimensions, equal in all examples.
_Form = tuple[np.dtype, int, tuple[int, ...]]
# The forms of a transform's features by task, split and position, taken from the first example.
_Forms = dict[tuple[str, str, int], dict[str, _Form]]


def _make_identity(transform: Transform, function: Callable, identity: Any) -> dict[str, Any]:
  return {type(transform).__name__: describe(function if identity is None else identity)}


def _count_rows(result: Any) -> dict[str, int | str]:
  """Return each feature's number of rows; the type's name for a value that is no feature or no batch."""
  if not isinstance(result, Mapping):
    return {"batch": type(result).__name__}
  return {
    name: len(feature)
    if isinstance(feature, Ragged) or (isinstance(feature, np.ndarray) and feature.ndim)
    else type(feature).__name__
    for name, feature in result.items()
  }


def _copy_examples(batch: Batch, records: Records) -> list[Example]:
  """Return each row's features as copies, so that functions may change them."""
  columns = [
    [row.copy() for row in feature.rows()] if isinstance(feature, Ragged) else list(feature.copy())
    for feature in batch.values()
  ]
  return [
    dict(zip(batch, (column[row] for column in columns), strict=True)) for row in range(len(records.indices))
  ]


def _call_for_each(function: Callable, records: Records, *arguments: Iterable[Any]) -> list[Any]:
  """Call a function with each record's arguments; add the record to the notes of its errors."""
  results = []
  for row, row_arguments in enumerate(zip(*arguments, strict=True)):
    try:
      results.append(function(*row_arguments))
    except Exception as error:
      error.add_note(f"in the transform of {_locate(records, row)}")
      raise
  return results


def _locate(records: Records, row: int) -> dict[str, Any]:
  return {
    "task": records.task,
    "split": records.split,
    "epoch": int(records.epochs[row]),
    "index": int(records.indices[row]),
    "place": records.place,
  }


def _stack(examples: Sequence[dict[str, np.ndarray]], records: Records, forms: _Forms) -> Batch:
  """Stack examples to one batch."""
  for row, example in enumerate(examples):
    form = {name: (array.dtype, array.ndim, array.shape[1:]) for name, array in example.items()}
    expected = forms.setdefault((records.task, records.split, records.place), form)
    if form != expected:
      names = [name for name in expected | form if expected.get(name) != form.get(name)]
      raise AnystepError(
        ExitCode.CONFIG,
        "transform_output",
        **_locate(records, row),
        expected={name: _format_form(expected.get(name)) for name in names},
        got={name: _format_form(form.get(name)) for name in names},
        fix="let the function return the same features for all examples, each of one dtype, rank and inner"
        " dimensions",
      )
  first = examples[0] if examples else {}
  return {name: _stack_column([example[name] for example in examples]) for name in first}


def _stack_column(arrays: Sequence[np.ndarray]) -> Ragged | np.ndarray:
  dtype = arrays[0].dtype
  if arrays[0].ndim:
    return Ragged.of_rows(arrays, dtype)
  column = np.empty(len(arrays), dtype)
  column[:] = [array[()] for array in arrays]
  return column


def _format_form(form: _Form | None) -> str | None:
  """Format a form: float32[] for a number, float32[n,2] for a sequence of pairs."""
  if form is None:
    return None
  dtype, rank, inner_shape = form
  return f"{dtype.name}[{','.join(['n', *map(str, inner_shape)] if rank else [])}]"


def _to_arrays(result: Any) -> dict[str, np.ndarray]:
  """Convert a function's result to arrays."""
  if not isinstance(result, Mapping):
    raise _make_example_error(got=type(result).__name__)
  arrays = {}
  for name, value in result.items():
    try:
      array = np.asarray(value)
    except ValueError as error:
      raise _make_example_error(got=f"{name}: {error}") from error
    if array.dtype.kind in "SU":
      # numpy's own text types drop zero bytes at the end.
      array = np.asarray(value, object)
    if array.dtype == object and not all(isinstance(text, (bytes, str)) for text in array.flat):
      raise _make_example_error(got=f"{name}: {value!r}")
    arrays[name] = array
  return arrays


def _make_example_error(*, got: str) -> AnystepError:
  return AnystepError(
    ExitCode.CONFIG,
    "transform_output",
    expected="an example: a dict of numbers, bytes, texts, or arrays of them",
    got=got,
    fix="let the function return a dict of such features",
  )
