"""Regular expressions over the paths of parameters, and what they stand for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax

from anystep.errors import AnystepError, ExitCode, one_line


def parameter_path(keys: Sequence[Any]) -> str:
  """Return the path of a parameter, such as `decoder/layers_0/mlp/wo/kernel`."""
  return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


@dataclasses.dataclass(frozen=True)
class ParameterPatterns:
  """Values by regular expression over parameter paths; the first that is found anywhere in a path counts.

  Attributes:
    argument: the argument that gave the pairs; errors name it.
    pairs: (regular expression, value).

  Raises:
    AnystepError: 78 `parameter_pattern` if the pairs are none, or an expression is invalid.

  >>> ParameterPatterns("rates", [("norm/", 0.1), ("", 1.0)]).find("decoder/norm/scale")
  0.1
  """

  argument: str
  pairs: Sequence[tuple[str, Any]]

  def __post_init__(self):
    try:
      for pattern, _ in self.pairs:
        re.compile(pattern)
    except (TypeError, ValueError, re.error) as error:
      raise AnystepError(
        ExitCode.CONFIG,
        "parameter_pattern",
        expected=f"{self.argument} as a list of pairs (regular expression, value)",
        got=f"{self.pairs!r}: {one_line(error)}",
        fix="write each pair as ('decoder/.*norm', value)",
      ) from error

  def index(self, path: str) -> int | None:
    """Return the number of the first pair whose expression is found in a path; None if none is."""
    return next((number for number, (pattern, _) in enumerate(self.pairs) if re.search(pattern, path)), None)

  def find(self, path: str) -> Any:
    """Return the value for a path.

    Raises:
      AnystepError: 78 `parameter_pattern` if no expression is found in it.
    """
    number = self.index(path)
    if number is None:
      raise AnystepError(
        ExitCode.CONFIG,
        "parameter_pattern",
        expected=f"an expression in {self.argument} that matches every parameter",
        got=f"none for {path}",
        fix="add a last pair ('.*', value) for all other parameters",
      )
    return self.pairs[number][1]
