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
"""Features by name: arrays of the example's own, which it may change in place; numbers, bytes and texts."""


@typing.final
class Map(Transform):
  """Each example as a function makes it.

  What has a rank of 1 or more becomes `Ragged`, else an array of shape `(rows,)`; bytes and texts are
  objects. Of no examples no features are made, for only running the function tells which.

  >>> scale = Map(lambda example: {"number": 2 * example["number"], "ones": np.ones(example["number"])})
  >>> records = Records(np.zeros(2, np.int64), np.arange(2), "demo", "train", 0)
  >>> batch = scale({"number": np.array([1, 2])}, records)
  >>> batch["number"], batch["ones"].lengths
  (array([2, 4]), array([1, 2]))

  Args:
    function: makes one example of one. It is called from several threads, and goes to worker processes as
      pickle takes it: a function of a module, not a lambda.
    identity: JSON that names what is done, another wherever results differ; by default the function's name,
      source and captured values, which say nothing of what it calls.
  """

  def __init__(self, function: Callable[[Example], Mapping[str, Any]], *, identity: Any = None):
    self._function = function
    self._forms: _Forms = {}
    self.identity = _identity(self, function, identity)

  def __call__(self, batch: Batch, records: Records) -> Batch:
    """See `Transform`.

    Raises:
      AnystepError: 78 `transform_output` where what the function makes is no example, or from one example to
        the next has other features, or one of another dtype, rank or inner dimensions.
    """
    examples = _results(lambda own: _arrays(self._function(own)), records, _examples(batch, records))
    return _stacked(examples, records, self._forms)


@typing.final
class RandomMap(Transform):
  """Each example as a function makes it that also draws; else as `Map`.

  Args:
    function: makes one example of one and a generator, which is keyed by the plan's seed, task, split, epoch,
      index and the transform's place: an example's draws are the same wherever and beside whatever it is
      read, and others in each epoch.
    identity: as for `Map`.
  """

  is_random = True

  def __init__(
    self, function: Callable[[Example, np.random.Generator], Mapping[str, Any]], *, identity: Any = None
  ):
    self._function = function
    self._forms: _Forms = {}
    self.identity = _identity(self, function, identity)

  def __call__(self, batch: Batch, records: Records) -> Batch:
    """See `Map`."""
    generators = (np.random.Generator(np.random.Philox(key=key)) for key in random_keys(records))
    examples = _results(
      lambda own, rng: _arrays(self._function(own, rng)), records, _examples(batch, records), generators
    )
    return _stacked(examples, records, self._forms)


@typing.final
class Filter(Transform):
  """Keeps the examples for which a predicate is true.

  Args:
    predicate: tells of an example whether it is kept, always the same of the same example.
    identity: as for `Map`.
  """

  may_drop = True

  def __init__(self, predicate: Callable[[Example], Any], *, identity: Any = None):
    self._predicate = predicate
    self.identity = _identity(self, predicate, identity)

  def __call__(self, batch: Batch, records: Records) -> Batch:
    """See `Transform`."""
    kept = self._kept(batch, records)
    if not kept.all():
      row = int(np.argmin(kept))
      raise AnystepError(
        ExitCode.DATA,
        "example_dropped",
        **_where(records, row),
        expected="an example that is kept, as the plan's unit table says",
        got="false from the filter's predicate",
        fix=f"{REMAKE_TABLE}; the filter's answer must depend on the example alone",
      )
    return batch

  def survey(self, batch: Batch, records: Records) -> tuple[Batch, np.ndarray]:
    """See `Transform`."""
    kept = self._kept(batch, records)
    return {name: select_rows(feature, kept) for name, feature in batch.items()}, np.flatnonzero(kept)

  def _kept(self, batch: Batch, records: Records) -> np.ndarray:
    answers = _results(lambda example: bool(self._predicate(example)), records, _examples(batch, records))
    return np.array(answers, bool)


@typing.final
class MapBatch(Transform):
  """Batches as a function makes them, for vectorised work: the same rows, each of its own example alone.

  Args:
    function: makes a batch of one, given whose records its rows are. Batches may have any number of rows,
      none included.
    identity: as for `Map`.
    is_random: whether the function draws, which it must by `anystep.transforms.random_keys` of the records.
  """

  def __init__(
    self, function: Callable[[Batch, Records], Batch], *, identity: Any = None, is_random: bool = False
  ):
    self._function = function
    self.identity = _identity(self, function, identity)
    self.is_random = is_random

  def __call__(self, batch: Batch, records: Records) -> Batch:
    """See `Transform`.

    Raises:
      AnystepError: 78 `transform_output` where what the function makes is no batch, or a feature has another
        number of rows.
    """
    made = self._function(batch, records)
    num_rows = len(records.indices)
    rows = _rows_or_types(made)
    if rows != dict.fromkeys(rows, num_rows):
      raise AnystepError(
        ExitCode.CONFIG,
        "transform_output",
        task=records.task,
        expected=f"Ragged and arrays by feature, of {num_rows} rows each",
        got={name: found for name, found in rows.items() if found != num_rows},
        fix="let the function return a dict with as many rows as it is given, in their order",
      )
    return made


# What a feature is in all examples: dtype, rank, inner dimensions.
_Form = tuple[np.dtype, int, tuple[int, ...]]
# The forms of the features that a transform makes, by task, split and place: those of the first example seen.
_Forms = dict[tuple[str, str, int], dict[str, _Form]]


def _identity(transform: Transform, function: Callable, identity: Any) -> dict[str, Any]:
  return {type(transform).__name__: describe(function if identity is None else identity)}


def _rows_or_types(made: Any) -> dict[str, int | str]:
  """By feature its number of rows; of what no batch can be, the type's name."""
  if not isinstance(made, Mapping):
    return {"batch": type(made).__name__}
  return {
    name: len(feature)
    if isinstance(feature, Ragged) or (isinstance(feature, np.ndarray) and feature.ndim)
    else type(feature).__name__
    for name, feature in made.items()
  }


def _examples(batch: Batch, records: Records) -> list[Example]:
  """Each row's features, copied, so that who changes one changes no other and not the batch."""
  columns = [
    [row.copy() for row in feature.rows()] if isinstance(feature, Ragged) else list(feature.copy())
    for feature in batch.values()
  ]
  return [
    dict(zip(batch, (column[row] for column in columns), strict=True)) for row in range(len(records.indices))
  ]


def _results(function: Callable, records: Records, *arguments: Iterable[Any]) -> list[Any]:
  """What a function makes of each record's arguments; where it fails, the error says of which."""
  results = []
  for row, own in enumerate(zip(*arguments, strict=True)):
    try:
      results.append(function(*own))
    except Exception as error:
      error.add_note(f"in the transform of {_where(records, row)}")
      raise
  return results


def _where(records: Records, row: int) -> dict[str, Any]:
  return {
    "task": records.task,
    "split": records.split,
    "epoch": int(records.epochs[row]),
    "index": int(records.indices[row]),
    "place": records.place,
  }


def _stacked(examples: Sequence[dict[str, np.ndarray]], records: Records, forms: _Forms) -> Batch:
  """Examples as one batch."""
  for row, example in enumerate(examples):
    form = {name: (array.dtype, array.ndim, array.shape[1:]) for name, array in example.items()}
    known = forms.setdefault((records.task, records.split, records.place), form)
    if form != known:
      names = [name for name in known | form if known.get(name) != form.get(name)]
      raise AnystepError(
        ExitCode.CONFIG,
        "transform_output",
        **_where(records, row),
        expected={name: _shown(known.get(name)) for name in names},
        got={name: _shown(form.get(name)) for name in names},
        fix="let the function make features of one name, dtype, rank and inner dimensions of all examples",
      )
  first = examples[0] if examples else {}
  return {name: _column([example[name] for example in examples]) for name in first}


def _column(arrays: Sequence[np.ndarray]) -> Ragged | np.ndarray:
  dtype = arrays[0].dtype
  if arrays[0].ndim:
    return Ragged.of_rows(arrays, dtype)
  column = np.empty(len(arrays), dtype)
  column[:] = [array[()] for array in arrays]
  return column


def _shown(form: _Form | None) -> str | None:
  """A form as text: of a number float32[], of a sequence of pairs float32[n,2]."""
  if form is None:
    return None
  dtype, rank, inner_shape = form
  return f"{dtype.name}[{','.join(['n', *map(str, inner_shape)] if rank else [])}]"


def _arrays(made: Any) -> dict[str, np.ndarray]:
  """What a function made, as arrays."""
  if not isinstance(made, Mapping):
    raise _no_example(got=type(made).__name__)
  arrays = {}
  for name, value in made.items():
    try:
      array = np.asarray(value)
    except ValueError as error:
      raise _no_example(got=f"{name}: {error}") from error
    if array.dtype.kind in "SU":
      # numpy's own text types drop zero bytes at the end.
      array = np.asarray(value, object)
    if array.dtype == object and not all(isinstance(text, (bytes, str)) for text in array.flat):
      raise _no_example(got=f"{name}: {value!r}")
    arrays[name] = array
  return arrays


def _no_example(*, got: str) -> AnystepError:
  return AnystepError(
    ExitCode.CONFIG,
    "transform_output",
    expected="an example: by name numbers, bytes, texts, or arrays of them",
    got=got,
    fix="let the function return a dict of such features",
  )
