"""Leaves of optimizers' states by the names that version 0.1 saved them under."""

from __future__ import annotations

import re
from collections.abc import Collection

# Its Adafactor was a chain of optax's: second moments, and later the schedule, whose count is the same.
_ADAFACTOR = "0."
_SCHEDULE_COUNT = re.compile(r"[1-9]\d*\.count\Z")


def earlier_names(saved: Collection[str], expected: Collection[str]) -> dict[str, str]:
  """Return the saved name of each leaf of an Adafactor's state, if version 0.1 saved it; else nothing.

  Args:
    saved: names of the leaves in a checkpoint.
    expected: names of the leaves of the optimizer that is to be restored.

  >>> earlier_names(["0.count", "0.v.w", "2.count"], ["count", "v.w"])
  {'count': '0.count', 'v.w': '0.v.w'}
  >>> earlier_names(["count", "v.w"], ["count", "v.w"])
  {}
  """
  names = {name: f"{_ADAFACTOR}{name}" for name in expected}
  others = set(saved) - set(names.values())
  is_earlier = set(names.values()) <= set(saved) and all(map(_SCHEDULE_COUNT.match, others))
  return names if is_earlier else {}
