"""Examples that cannot be cached: the job ends at the first, or leaves out and lists a limited number."""

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
# The preprocessor of a problem is looked for among so many of the source's first examples: most come early.
_SEARCHED_EXAMPLES = (1 << 9, 1 << 15, None)

# Stands for the preprocessor where the source itself raises.
SOURCE = "the source"
RAISED = "preprocessor_failed"


class BadExamples:
  """Bad examples of a source range.

  Args:
    limit: the greatest number that is left out.
    source_name: the range's name.
    find_step: returns the preprocessor that causes a problem; None where the problem does not come again.
  """

  def __init__(self, *, limit: int, source_name: str, find_step: Callable[[Problem], str | None]):
    self._limit = limit
    self._source_name = source_name
    self._find_step = find_step
    self.entries: list[dict[str, Any]] = []

  def add(self, problem: Problem, *, place: int, example: Mapping[str, Any] | None) -> None:
    """List an example.

    Args:
      problem: what is wrong with it.
      place: how many examples of the range came before it.
      example: the example itself; None where a preprocessor raised in place of giving one.

    Raises:
      AnystepError: 65, of the problem's kind, where the limit is passed; 66 `source_unreadable` where the
        source raises, whatever the limit.
    """
    step = self._find_step(problem)
    where = {"source_shard": self._source_name, "place": place}
    if step == SOURCE and problem.kind == RAISED:
      raise make_unreadable_error(problem.got, **where)
    self.entries.append(
      {
        **where,
        "preprocessor": step,
        "kind": problem.kind,
        "feature": problem.feature,
        "got": problem.got,
        "example": example and {name: _format_value(value) for name, value in example.items()},
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


def make_unreadable_error(got: str, **where: object) -> AnystepError:
  """Return the error of a source that raises."""
  return AnystepError(
    ExitCode.NO_INPUT,
    "source_unreadable",
    **where,
    got=got,
    fix="see to the source's files, and run the same command again; what is finished is kept",
  )


def make_raised_problem(error: BaseException) -> Problem:
  """Return the problem of an example at which a preprocessor raised."""
  return Problem(kind=RAISED, feature="", expected="", got=one_line(error, without_graph=True))


def make_step_finder(
  step_names: Sequence[str],
  problems_after: Callable[[int, int | None], Iterable[Problem]],
  *,
  limit: int,
) -> Callable[[Problem], str | None]:
  """Return a function that finds the preprocessor of a problem, by running the first few of them again.

  Args:
    step_names: the preprocessors.
    problems_after: the problems after so many of them, with so many of the source's first examples, or with
      all. It is called where there is a problem, at most once for the same two numbers.
    limit: the greatest number of problems that is left out; no more than one beyond it is asked for.
  """

  @functools.cache
  def find_recurring(num_steps: int, num_examples: int | None) -> set[Problem]:
    problems = map(_drop_later_changes, problems_after(num_steps, num_examples))
    if num_steps == len(step_names):
      return set(itertools.islice(problems, limit + 1))
    # Fewer steps may leave any number of others, which later ones mend.
    final_problems = find_recurring(len(step_names), num_examples)
    recurring: set[Problem] = set()
    for problem in problems:
      recurring |= {problem} & final_problems
      if recurring == final_problems:
        break
    return recurring

  def find(problem: Problem) -> str | None:
    problem = _drop_later_changes(problem)
    for num_examples in _SEARCHED_EXAMPLES:
      if problem in find_recurring(len(step_names), num_examples):
        steps = enumerate([SOURCE, *step_names])
        return next(name for k, name in steps if problem in find_recurring(k, num_examples))
    return None

  return find


def _drop_later_changes(problem: Problem) -> Problem:
  """Return a problem without the part that later preprocessors change."""
  return dataclasses.replace(problem, got="") if problem.kind == TOO_LARGE else problem


def _format_value(value: Any) -> Any:
  """Return a feature's value for people: cut, and bytes as text where they are UTF-8."""
  if hasattr(value, "rows"):
    return [_format_value(row) for row in value[:_SHOWN_VALUES].rows()]
  array = np.array(value, object) if isinstance(value, bytes) else np.asarray(value)
  first_values = array.reshape(-1)[:_SHOWN_VALUES].tolist()
  if array.dtype.hasobject:
    texts = [text[:_SHOWN_BYTES].decode(errors="backslashreplace") for text in first_values]
    return texts if array.shape else texts[0]
  # As text, for JSON knows no NaN.
  return str(first_values) if array.shape else str(first_values[0])
