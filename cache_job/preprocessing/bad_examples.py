"""Examples that cannot be cached: the job ends at the first, or lists as many as it was told to bear."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from anystep.cache_job.preprocessing.example_checks import TOO_LARGE, Problem
from anystep.errors import AnystepError, ExitCode, one_line

_SHOWN_BYTES = 1000
_SHOWN_VALUES = 100
# Where a problem comes from is looked for among so many of the source's examples first: most come early.
_SEARCHED_EXAMPLES = (1 << 9, 1 << 15, None)

# By what the examples come before any preprocessor.
SOURCE = "the source"
RAISED = "preprocessor_failed"


class BadExamples:
  """The bad examples of a source range.

  Args:
    limit: so many are borne.
    source_name: the range's name.
    find_step: the preprocessor by which a problem came; None where it is not found again.
  """

  def __init__(self, *, limit: int, source_name: str, find_step: Callable[[Problem], str | None]):
    self._limit = limit
    self._source_name = source_name
    self._find_step = find_step
    self.entries: list[dict[str, Any]] = []

  def add(self, problem: Problem, *, place: int, example: Mapping[str, Any] | None) -> None:
    """Notes one.

    Args:
      problem: what is wrong with it.
      place: how many examples of the range came before it.
      example: the example itself; None where a preprocessor raised in place of giving one.

    Raises:
      AnystepError: 65, of the problem's kind, where it is one too many; 66 `source_unreadable` where the
        source raises, which no number of examples makes good.
    """
    step = self._find_step(problem)
    where = {"source_shard": self._source_name, "place": place}
    if step == SOURCE and problem.kind == RAISED:
      raise source_unreadable(problem.got, **where)
    self.entries.append(
      {
        **where,
        "preprocessor": step,
        "kind": problem.kind,
        "feature": problem.feature,
        "got": problem.got,
        "example": example and {name: _as_json(value) for name, value in example.items()},
      }
    )
    if len(self.entries) > self._limit:
      raise AnystepError(
        ExitCode.DATA,
        problem.kind,
        **where,
        preprocessor=step or "unknown",
        **({"feature": problem.feature} if problem.feature else {}),
        **({"expected": problem.expected} if problem.expected else {}),
        got=problem.got,
        **({"bad_examples": len(self.entries)} if self._limit else {}),
        fix="mend the source or the preprocessor and run the same command again, or leave so many examples"
        " out with --max_bad_examples",
      )


def source_unreadable(got: str, **where: object) -> AnystepError:
  """The error of a source that raises."""
  return AnystepError(
    ExitCode.NO_INPUT,
    "source_unreadable",
    **where,
    got=got,
    fix="see to the source's files, and run the same command again; what is finished is kept",
  )


def raised_problem(error: BaseException) -> Problem:
  """What is wrong with an example of which a preprocessor raised."""
  return Problem(kind=RAISED, feature="", expected="", got=one_line(error, without_graph=True))


def step_finder(
  step_names: Sequence[str],
  problems_after: Callable[[int, int | None], Iterable[Problem]],
  *,
  limit: int,
) -> Callable[[Problem], str | None]:
  """Finds by which preprocessor problems come, by running the first few of them again.

  Args:
    step_names: the preprocessors.
    problems_after: the problems after so many of them, with so many of the source's first examples, or with
      all. It is called where there is a problem, at most once for the same two numbers.
    limit: so many problems are borne; one more is the last that is asked for.
  """

  @functools.cache
  def found(num_steps: int, num_examples: int | None) -> set[Problem]:
    occurring = map(_recognizable, problems_after(num_steps, num_examples))
    if num_steps == len(step_names):
      return set(itertools.islice(occurring, limit + 1))
    # Fewer steps may leave any number of others, which later ones mend.
    wanted = found(len(step_names), num_examples)
    occurred: set[Problem] = set()
    for problem in occurring:
      occurred |= {problem} & wanted
      if occurred == wanted:
        break
    return occurred

  def find(problem: Problem) -> str | None:
    problem = _recognizable(problem)
    for num_examples in _SEARCHED_EXAMPLES:
      if problem in found(len(step_names), num_examples):
        steps = enumerate([SOURCE, *step_names])
        return next(name for k, name in steps if problem in found(k, num_examples))
    return None

  return find


def _recognizable(problem: Problem) -> Problem:
  """A problem without what later preprocessors change of it."""
  return dataclasses.replace(problem, got="") if problem.kind == TOO_LARGE else problem


def _as_json(value: Any) -> Any:
  """A feature's value for people: cut, and bytes as text as far as they are."""
  if hasattr(value, "rows"):
    return [_as_json(row) for row in value[:_SHOWN_VALUES].rows()]
  array = np.array(value, object) if isinstance(value, bytes) else np.asarray(value)
  shown = array.reshape(-1)[:_SHOWN_VALUES].tolist()
  if array.dtype.hasobject:
    texts = [text[:_SHOWN_BYTES].decode(errors="backslashreplace") for text in shown]
    return texts if array.shape else texts[0]
  # As text, for JSON knows no NaN.
  return str(shown) if array.shape else str(shown[0])
