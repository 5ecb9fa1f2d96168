"""Profile of some steps, for TensorBoard's profiler and XProf."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
from etils import epath

from anystep.limits import is_count

FOLDER = "profile"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
  """Steps whose profile is written.

  Attributes:
    first_step: the first, by the model's count; not the first of a run, which waits for the compiler.
    num_steps: their number.

  Raises:
    ValueError: a number is no whole number, or there are no steps.
  """

  first_step: int
  num_steps: int = 5

  def __post_init__(self):
    if not (is_count(self.first_step) and is_count(self.num_steps, least=1)):
      raise ValueError(f"Profile: expected whole numbers, got {self.first_step!r} and {self.num_steps!r}")


class _Profiler:
  def __init__(self, profile: Profile | None, model_dir: epath.PathLike):
    self._profile, self._folder = profile, epath.Path(model_dir) / FOLDER
    self._is_running = False

  def before(self, step: int) -> None:
    """Begin or end the profile before a step."""
    if self._profile is None:
      return
    if self._is_running and step >= self._profile.first_step + self._profile.num_steps:
      self.stop()
    elif step == self._profile.first_step:
      jax.profiler.start_trace(str(self._folder))
      self._is_running = True

  def stop(self) -> None:
    if self._is_running:
      self._is_running = False
      jax.profiler.stop_trace()


@contextlib.contextmanager
def profiled(profile: Profile | None, model_dir: epath.PathLike) -> Iterator[_Profiler]:
  """Yield what begins and ends a profile before steps; one that still runs is ended and written."""
  profiler = _Profiler(profile, model_dir)
  try:
    yield profiler
  finally:
    profiler.stop()
