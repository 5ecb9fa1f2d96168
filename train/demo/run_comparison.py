"""Comparison of two runs, bit for bit: batches, losses and parameters."""

from __future__ import annotations

import dataclasses
import hashlib

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from anystep.errors import AnystepError, ExitCode
from anystep.train.checkpoints.checkpoints import checkpoint_directory, checkpoint_steps
from anystep.train.reports.step_log import StepRecord, read_step_log


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """Agreement of an interrupted run with an undisturbed one.

  Attributes:
    total_steps: number of steps of the longer run.
    killed_at: number of steps that the interrupted run logged before its first kill.
    resumed_from: first step of its last start.
    identical_batches, identical_losses: number of steps with the same records in both runs.
    parameters: sha256 of the final parameters, undisturbed and interrupted.
  """

  total_steps: int
  killed_at: int
  resumed_from: int
  identical_batches: int
  identical_losses: int
  parameters: tuple[str, str]

  @property
  def identical(self) -> bool:
    """True where batches, losses and parameters all agree."""
    return (
      self.identical_batches == self.identical_losses == self.total_steps
      and self.parameters[0] == self.parameters[1]
    )

  @property
  def verdict(self) -> str:
    """Return the comparison in one line."""
    losses = "identical" if self.identical_losses == self.total_steps else "DIFFERENT"
    parameters = "identical" if self.parameters[0] == self.parameters[1] else "DIFFERENT"
    return (
      f"killed at step {self.killed_at}, resumed from {self.resumed_from}: "
      f"{self.identical_batches}/{self.total_steps} batches identical, "
      f"losses {losses}, parameters {parameters}"
    )


def compare_runs(undisturbed: epath.PathLike, interrupted: epath.PathLike) -> Comparison:
  """Compare two runs by their step logs and their last checkpoints.

  A step that the interrupted run took twice must agree both times.

  Raises:
    AnystepError: 66 `run_incomplete` if a directory holds no finished run.
  """
  reference, starts = _by_step(_starts(undisturbed)), _starts(interrupted)
  records = _by_step(starts)
  if sorted(reference) != list(range(len(reference))):
    raise _incomplete(undisturbed)
  total_steps = max(len(reference), max(records) + 1)
  batches = losses = 0
  for step in range(total_steps):
    step_records = [*reference.get(step, []), *records.get(step, [])]
    in_both = step in reference and step in records
    batches += in_both and len({record.digest for record in step_records}) == 1
    # Bits are compared, so that NaN equals NaN.
    losses += in_both and len({record.loss.hex() for record in step_records}) == 1
  return Comparison(
    total_steps=total_steps,
    killed_at=len(starts[0]),
    resumed_from=starts[-1][0].step,
    identical_batches=batches,
    identical_losses=losses,
    parameters=(parameters_sha256(undisturbed), parameters_sha256(interrupted)),
  )


def parameters_sha256(model_dir: epath.PathLike) -> str:
  """Return the sha256 of path, dtype, shape and bytes of each parameter in the newest checkpoint."""
  steps = checkpoint_steps(model_dir)
  if not steps:
    raise _incomplete(model_dir)
  path = checkpoint_directory(model_dir, steps[-1]) / "state"
  with ocp.StandardCheckpointer() as checkpointer:
    saved = checkpointer.metadata(path).item_metadata.tree
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), saved)
    params = checkpointer.restore(path, abstract)["params"]
  digest = hashlib.sha256()
  for key, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
    array = np.asarray(leaf)
    digest.update(f"{jax.tree_util.keystr(key)}\x1f{array.dtype}\x1f{array.shape}\x1f".encode())
    digest.update(array.tobytes())
  return digest.hexdigest()


def _by_step(starts: list[list[StepRecord]]) -> dict[int, list[StepRecord]]:
  records: dict[int, list[StepRecord]] = {}
  for start in starts:
    for record in start:
      records.setdefault(record.data_step, []).append(record)
  return records


def _starts(model_dir: epath.PathLike) -> list[list[StepRecord]]:
  starts = [start for start in read_step_log(model_dir) if start]
  if not starts:
    raise _incomplete(model_dir)
  return starts


def _incomplete(model_dir: epath.PathLike) -> AnystepError:
  return AnystepError(
    ExitCode.NO_INPUT,
    "run_incomplete",
    path=model_dir,
    expected="a step log and a checkpoint",
    fix="train to the end there first",
  )
