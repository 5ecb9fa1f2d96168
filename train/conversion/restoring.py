"""Start of a run with a checkpoint of any format: its leaves become the leaves of the model's state."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np

from anystep.errors import AnystepError, ExitCode, find_nearest
from anystep.programs.progress import log_notice
from anystep.train.checkpoints.restore_config import ALL, REFUSE, STEP, RestoreConfig
from anystep.train.checkpoints.saved_arrays import as_tree, from_tree
from anystep.train.configuration.built_values import Value
from anystep.train.conversion.anystep_format import is_count, leaf_names, settings_of
from anystep.train.conversion.assignment import Assignment, assign, check_rules
from anystep.train.conversion.formats import (
  SavedCheckpoint,
  find_checkpoints,
  find_step,
  is_floating,
  open_checkpoint,
)
from anystep.train.leaves.leaf import (
  MOMENTS,
  OTHER_OPTIMIZER,
  Leaf,
  array_leaf,
  find_dtype,
  is_filler,
)
from anystep.train.leaves.leaf import STEP as STEP_LEAF
from anystep.train.leaves.orbax_trees import Keys
from anystep.train.models.train_state import TrainState

_SHOWN_NAMES = 8
# The first leaf of Adafactor's state has this in its name, whatever stands around it.
_ADAFACTOR = "v_row."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
  """Checkpoint that a run starts with.

  Attributes:
    saved: the checkpoint; its arrays are read later.
    config: which of its leaves are restored, and how.
  """

  saved: SavedCheckpoint
  config: RestoreConfig

  @property
  def step(self) -> int:
    """Step that the run begins at: the checkpoint's, or 0 where a rule drops it."""
    rules = self.config.assignment_map
    template = next((name for pattern, name in rules if re.fullmatch(pattern, STEP_LEAF)), STEP_LEAF)
    return 0 if template is None else self.saved.step

  def __str__(self) -> str:
    return f"{self.saved.path} ({self.saved.format})"


def open_start(config: RestoreConfig, values: Mapping[str, Value] | None = None) -> Start:
  """Find the checkpoint that a run starts with.

  Args:
    config: where it is.
    values: the values that decide the run's parameters, see `built_values`.

  Raises:
    AnystepError: 66 `checkpoint_missing`; 76 `checkpoint_settings` where the network has other settings than
      the checkpoint's; 78 `assignment`, `restore_mode`; as `open_checkpoint`.
  """
  check_rules(config.assignment_map)
  paths = find_checkpoints(str(config.path))
  path = paths[-1]
  if config.mode == STEP:
    assert config.step is not None, "RestoreConfig refuses it"
    path = find_step(paths, config.step)
  elif config.mode == ALL and len(paths) > 1:
    raise AnystepError(
      ExitCode.CONFIG,
      "restore_mode",
      path=config.path,
      expected="one checkpoint to train from",
      got=f"mode='{ALL}', and {len(paths)} checkpoints",
      fix="set mode='newest', or mode='step' and the step",
    )
  saved = open_checkpoint(path)
  check_settings(saved, settings_of(values or {}))
  return Start(saved=saved, config=config)


def check_settings(saved: SavedCheckpoint, settings: Mapping[str, Value]) -> None:
  """Refuse settings that would make another network of the same leaves.

  Raises:
    AnystepError: 76 `checkpoint_settings`.
  """
  differing = [name for name, value in settings.items() if saved.settings.get(name, value) != value]
  if differing:
    raise AnystepError(
      ExitCode.MISMATCH,
      "checkpoint_settings",
      path=saved.path,
      expected=", ".join(f"{name} = {saved.settings[name]}" for name in differing),
      got=", ".join(f"{name} = {settings[name]}" for name in differing),
      fix="set these of the network's config as the checkpoint's",
    )


def with_dtype(abstract: TrainState, dtype: str | None) -> TrainState:
  """Return an abstract state with the parameters' dtype changed; None leaves it."""
  if dtype is None:
    return abstract

  def change(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    is_cast = is_floating(np.dtype(leaf.dtype))
    return leaf.update(dtype=find_dtype(dtype)) if is_cast else leaf

  return dataclasses.replace(abstract, params=jax.tree.map(change, abstract.params))


def restore_start(start: Start, abstract: TrainState, make_initial: Callable[..., TrainState]) -> TrainState:
  """Return a state of the model with the leaves of a checkpoint, on the abstract state's devices.

  Leaves are read one after another, each device's part by itself. An optimizer that begins anew begins from
  the restored parameters: so does an average of them.

  Args:
    start: the checkpoint, and which leaves are restored.
    abstract: shapes, dtypes and shardings.
    make_initial: makes the state from which leaves come that are not restored, as `initialize` returns it;
      called if there are any.

  Raises:
    AnystepError: 76 `checkpoint_tree` for a leaf that is missing or of another shape; 78 `assignment`; 65
      `checkpoint_corrupt`.
  """
  saved, config = start.saved, start.config
  targets = {_keys(path): leaf for path, leaf in _flatten(abstract)}
  names = leaf_names(targets)
  by_name = {names[keys]: leaf for keys, leaf in targets.items()}
  counts = {name for name, leaf in by_name.items() if is_count(name, leaf)}
  absent = counts if STEP_LEAF in saved.leaves else {*counts, STEP_LEAF}
  wanted = [name for name in by_name if name not in absent and _is_restored(name, config)]
  readable = {name: leaf for name, leaf in saved.leaves.items() if _is_restored(name, config)}
  assignment = assign(wanted, readable, config.assignment_map)
  _check(saved, config, assignment, by_name)
  _report(saved, assignment, set(by_name) - set(assignment.sources) - absent)
  sources = {name: saved.leaves[source] for name, source in assignment.sources.items()}
  # A format without a step, such as Hugging Face's, is at step 0; so is one whose step a rule drops.
  step_leaf = sources.setdefault(STEP_LEAF, array_leaf(np.zeros((), np.int32)))
  step = int(step_leaf.read_whole())
  restored = {name for name in assignment.sources if name != STEP_LEAF}
  for name in counts:
    counted = array_leaf(np.asarray(_count(name, step, restored, by_name)))
    sources[name] = saved.leaves.get(name, counted) if config.optimizer_state else counted
  state = {
    keys: _place(sources[names[keys]], target) for keys, target in targets.items() if names[keys] in sources
  }
  fresh = {keys: target for keys, target in targets.items() if keys not in state}
  params = {"/".join(keys[1:]): leaf for keys, leaf in state.items() if keys[0] == "params"}
  return from_tree(_nest(state | _initialize(fresh, make_initial, params)), abstract)


def _is_restored(name: str, config: RestoreConfig) -> bool:
  return config.optimizer_state or not name.startswith((MOMENTS, OTHER_OPTIMIZER))


def _check(
  saved: SavedCheckpoint,
  config: RestoreConfig,
  assignment: Assignment,
  by_name: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
  """Refuse leaves that are missing, unless they may be, and leaves of another shape."""
  if config.missing == REFUSE and assignment.fresh:
    name = assignment.fresh[0]
    fix = "set the model's sizes as the checkpoint's, or name another source of the leaf by an assignment_map"
    if all(one.startswith((MOMENTS, OTHER_OPTIMIZER)) for one in assignment.fresh):
      fix = "set optimizer_state=False to begin the optimizer anew"
    raise AnystepError(
      ExitCode.MISMATCH,
      "checkpoint_tree",
      path=saved.path,
      leaf=name,
      expected=_describe(by_name[name]),
      got=f"no such leaf, and {len(assignment.fresh) - 1} more; nearest: {find_nearest(name, saved.leaves)}",
      fix=fix,
    )
  for name, source in assignment.sources.items():
    if tuple(by_name[name].shape) != saved.leaves[source].shape:
      raise AnystepError(
        ExitCode.MISMATCH,
        "checkpoint_tree",
        path=saved.path,
        leaf=name,
        expected=_describe(by_name[name]),
        got=f"{saved.leaves[source].describe()} of {source}",
        fix="set the model's sizes as the checkpoint's, or drop the leaf by an assignment_map",
      )


def _report(saved: SavedCheckpoint, assignment: Assignment, fresh: Collection[str]) -> None:
  unread = [name for name in assignment.unread if not is_filler(name, saved.leaves[name])]
  reports = [
    (sorted(fresh), "leaves are initialized, not restored"),
    (unread, "leaves of the checkpoint are not in the model"),
    (assignment.overridden, "leaves are read by their own names, not by a rule: nothing else reads these"),
  ]
  for names, text in reports:
    if names:
      more = ", …" if len(names) > _SHOWN_NAMES else ""
      log_notice(f"{len(names)} {text}: {', '.join(names[:_SHOWN_NAMES])}{more}")


def _count(name: str, step: int, restored: set[str], by_name: Collection[str]) -> int:
  """Return a count of an optimizer's transformation: the model's step, as Adafactor and schedules need it.

  Another transformation that begins anew corrects its means by its count, which begins anew too.
  """
  start = name.removesuffix("count")
  siblings = {other for other in by_name if other.startswith(start) and other != name}
  is_adafactors = any(_ADAFACTOR in other for other in siblings)
  return step if is_adafactors or not siblings or siblings & restored else 0


def _place(leaf: Leaf, target: jax.ShapeDtypeStruct) -> jax.Array:
  """Return a leaf on devices, each with its own part."""
  dtype = np.dtype(target.dtype)

  def read(index: tuple[slice, ...] | None) -> np.ndarray:
    assert index is not None, "every device has a part"
    part = tuple(slice(*one.indices(size)[:2]) for one, size in zip(index, leaf.shape, strict=True))
    return leaf.read(part).astype(dtype, copy=False)

  return jax.make_array_from_callback(leaf.shape, target.sharding, read)


def _initialize(
  targets: Mapping[Keys, jax.ShapeDtypeStruct],
  make_initial: Callable[..., TrainState],
  params: Mapping[str, jax.Array],
) -> dict[Keys, jax.Array]:
  """Return some leaves of the initial state with these parameters; others are not computed."""
  if not targets:
    return {}

  def make(params: Mapping[str, jax.Array]) -> list[jax.Array]:
    leaves = {_keys(path): leaf for path, leaf in _flatten(make_initial(params))}
    return [leaves[keys].astype(target.dtype) for keys, target in targets.items()]

  shardings = [target.sharding for target in targets.values()]
  return dict(zip(targets, jax.jit(make, out_shardings=shardings)(params), strict=True))


def _flatten(state: TrainState) -> list[tuple[tuple[Any, ...], Any]]:
  return jax.tree_util.tree_flatten_with_path(as_tree(state))[0]


def _keys(path: tuple[Any, ...]) -> Keys:
  return tuple(str(key.key) for key in path)


def _nest(leaves: Mapping[Keys, Any]) -> dict[str, Any]:
  tree: dict[str, Any] = {"opt_state": {}}
  for keys, leaf in leaves.items():
    inner = tree
    for key in keys[:-1]:
      inner = inner.setdefault(key, {})
    inner[keys[-1]] = leaf
  return tree


def _describe(target: jax.ShapeDtypeStruct) -> str:
  return f"{np.dtype(target.dtype)} {tuple(target.shape)}"
