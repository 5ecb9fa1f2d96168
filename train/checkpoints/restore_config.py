"""Configuration of the checkpoint that a run starts with."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from anystep.limits import is_count, is_name

NEWEST, ALL, STEP = "newest", "all", "step"
REFUSE, INITIALIZE = "refuse", "initialize"
_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreConfig:
  r"""Checkpoint of any format that a run starts with; once it has a checkpoint of its own, it resumes that.

  The run begins at the checkpoint's step, with the first step of its own data.

  Attributes:
    path: a checkpoint, or a directory of some, as `anystep-convert --from` takes it.
    mode: which of several: `newest`; `step`, the one of `step`; `all`, which trains only where there is one.
    step: see mode.
    assignment_map: pairs of a regular expression and a template, T5X's: where an expression matches the whole
      name of a leaf of the model, such as ('(.*)/layers_3/(.*)', r'\1/layers_2/\2'), that leaf is read from
      the saved leaf that the template names; None initializes it. The first pair that matches counts, and a
      pair that matches nothing is refused. Names are those that `anystep-convert --dry_run` lists.
    missing: `refuse` a checkpoint that lacks a leaf, or `initialize` such leaves. The latter needs an
      assignment_map.
    optimizer_state: whether the optimizer's moments are restored too; else they begin anew, at this step.
    dtype: dtype that parameters are kept in, such as 'bfloat16'; None for the model's.

  Raises:
    ValueError: an attribute has none of its values.
  """

  path: str
  mode: str = NEWEST
  step: int | None = None
  assignment_map: Sequence[tuple[str, str | None]] = ()
  missing: str = REFUSE
  optimizer_state: bool = True
  dtype: str | None = None

  def __post_init__(self):
    if not isinstance(self.path, (str, os.PathLike)) or not is_name(os.fspath(self.path)):
      raise ValueError(f"path is a path without control characters, not {self.path!r}")
    if self.mode not in (NEWEST, ALL, STEP):
      raise ValueError(f"mode: expected {NEWEST}, {ALL} or {STEP}, got {self.mode!r}")
    if (self.mode == STEP) is not is_count(self.step):
      raise ValueError(f"step is a whole number with mode={STEP!r}, and None without, not {self.step!r}")
    if self.missing not in (REFUSE, INITIALIZE):
      raise ValueError(f"missing: expected {REFUSE} or {INITIALIZE}, got {self.missing!r}")
    if self.missing == INITIALIZE and not self.assignment_map:
      raise ValueError(f"missing={INITIALIZE!r} needs an assignment_map that says what may be missing")
    if not isinstance(self.optimizer_state, bool):
      raise ValueError(f"optimizer_state is True or False, not {self.optimizer_state!r}")
    if self.dtype is not None and self.dtype not in _DTYPES:
      raise ValueError(f"dtype: expected {', '.join(_DTYPES)} or None, got {self.dtype!r}")
