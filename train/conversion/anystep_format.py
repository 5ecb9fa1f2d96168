"""Our own checkpoints as leaves of T5X's names."""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from etils import epath

from anystep.errors import AnystepError, ExitCode
from anystep.files.json_files import MALFORMED, canonical_json, read_json
from anystep.train.checkpoints.integrity import (
  COMMITTED,
  CONVERTED,
  INTEGRITY,
  TRAINED_WITH,
  check_files,
  read_integrity,
  write_integrity,
)
from anystep.train.leaves import orbax_trees
from anystep.train.leaves.leaf import (
  MOMENTS,
  MUTABLES,
  OTHER_OPTIMIZER,
  PARAMETERS,
  SLOTS,
  STEP,
  Advance,
  Leaf,
  Leaves,
  Writer,
  array_leaf,
  is_filler,
  with_fillers,
)
from anystep.train.leaves.orbax_trees import Keys

if TYPE_CHECKING:
  import jax

_STATE, _COUNT = "state", "count"
_VERSION = 1
# By their names in the network's configuration, what numbers depend on and no leaf's shape says.
_SETTINGS = ("mlp_activations", "norm_epsilon", "rope_theta", "rope_scaling_factor")
_SCALING_SETTINGS = ("rope_low_freq_factor", "rope_high_freq_factor", "rope_original_length")
_CONFIG = "model.module.config."


def is_one(path: str) -> bool:
  """Return whether a directory is a checkpoint of ours."""
  return os.path.exists(os.path.join(path, INTEGRITY)) and os.path.exists(os.path.join(path, COMMITTED))


def read(path: str) -> dict[str, Leaf]:
  """Return the leaves of a checkpoint whose files are what its writer wrote.

  Raises:
    AnystepError: 65 `checkpoint_integrity`, `checkpoint_file`, `checkpoint_corrupt`.
  """
  directory = epath.Path(path)
  check_files(directory, read_integrity(directory))
  tree = orbax_trees.read_tree(os.path.join(path, _STATE))
  names = leaf_names(tree)
  leaves = {names[keys]: leaf for keys, leaf in tree.items()}
  # A count that is the step's says nothing that the step does not.
  step = leaves[STEP].read_whole()
  return with_fillers(
    {name: leaf for name, leaf in leaves.items() if not (is_count(name, leaf) and leaf.read_whole() == step)}
  )


def read_settings(path: str) -> dict[str, Any]:
  """Return what a network's numbers depend on besides its leaves, see `SavedCheckpoint`.

  Raises:
    AnystepError: 65 `checkpoint_corrupt`.
  """
  converted, trained_with = (os.path.join(path, name) for name in (CONVERTED, TRAINED_WITH))
  try:
    if os.path.exists(converted):
      return dict(read_json(converted).get("settings", {}))
    if not os.path.exists(trained_with):
      return {}
    return settings_of(read_json(trained_with)["values"])
  except MALFORMED as error:
    raise orbax_trees.corrupt_error(path, error) from error


def settings_of(values: Mapping[str, Any]) -> dict[str, Any]:
  """Return the settings among the values that decide a run's parameters, see `built_values`."""
  is_scaled = values.get(f"{_CONFIG}rope_scaling_factor") != 1.0
  names = (*_SETTINGS, *(_SCALING_SETTINGS if is_scaled else ()))
  return {name: values[_CONFIG + name] for name in names if _CONFIG + name in values}


def leaf_names(tree: Collection[Keys]) -> dict[Keys, str]:
  """Return T5X's name of each leaf of a state as `saved_arrays` saves it; of ours where T5X has none."""
  parameters = {".".join(keys[1:]): "/".join(keys[1:]) for keys in tree if keys[0] == "params"}
  saved = {keys[1] for keys in tree if keys[0] == "opt_state"}
  # Other transformations may stand around Adafactor: a chain's, of version 0.1; an average's.
  ends = [f"v_row.{name}" for name in parameters]
  prefixes = {name.removesuffix(ends[0]) for name in saved if ends and name.endswith(ends[0])}
  adafactor = next((start for start in sorted(prefixes) if {start + end for end in ends} <= saved), None)
  moments = {
    f"{adafactor}{slot}.{name}": f"{MOMENTS}{path}/{slot}"
    for slot in SLOTS
    for name, path in parameters.items()
  }

  def name_of(keys: Keys) -> str:
    match keys[0]:
      case "step":
        return STEP
      case "params":
        return PARAMETERS + "/".join(keys[1:])
      case "mutables":
        return MUTABLES + "/".join(keys[1:])
    return moments.get(keys[1], OTHER_OPTIMIZER + keys[1])

  return {keys: name_of(keys) for keys in tree}


def is_count(name: str, leaf: Leaf | jax.ShapeDtypeStruct) -> bool:
  """Return whether a leaf counts the steps of an optimizer's transformation."""
  is_named_so = name.startswith(OTHER_OPTIMIZER) and name[len(OTHER_OPTIMIZER) :].rpartition(".")[2] == _COUNT
  return is_named_so and leaf.shape == () and np.issubdtype(leaf.dtype, np.integer)


def plan_writing(leaves: Leaves, settings: Mapping[str, Any], *, source: str) -> Writer:
  """Return what writes a checkpoint to start runs from.

  It has no data of a run, so `find_checkpoint` refuses it.

  Args:
    leaves: leaves by T5X's names.
    settings: what numbers depend on besides them.
    source: where they come from, for people.

  Raises:
    AnystepError: 76 `checkpoint_tree` for a leaf that no state of ours has.
  """
  tree = _as_tree(leaves)
  step = int(tree["step",].read_whole())

  def write(path: str, advance: Advance) -> None:
    state = os.path.join(path, _STATE)
    orbax_trees.write_tree(state, tree, advance)
    orbax_trees.write_checkpoint_metadata(state, orbax_trees.STANDARD_HANDLER)
    directory = epath.Path(path)
    document = {"version": _VERSION, "from": source} | ({"settings": dict(settings)} if settings else {})
    (directory / CONVERTED).write_text(canonical_json(document, indent=1) + "\n")
    marker = write_integrity(directory, step=step, run=uuid.uuid4().hex)
    (directory / COMMITTED).write_text(marker)

  return write


def _as_tree(leaves: Leaves) -> Mapping[Keys, Leaf]:
  step = array_leaf(np.asarray(leaves[STEP].read_whole() if STEP in leaves else 0, np.int32))
  moments = {name: leaf for name, leaf in leaves.items() if name.startswith(MOMENTS)}
  has_momentum = any(name.endswith("/m") and not is_filler(name, leaf) for name, leaf in moments.items())
  tree: dict[Keys, Leaf] = {("step",): step}
  for name, leaf in leaves.items():
    if name.startswith(PARAMETERS):
      tree["params", *name.removeprefix(PARAMETERS).split("/")] = leaf
    elif name.startswith(MUTABLES):
      tree["mutables", *name.removeprefix(MUTABLES).split("/")] = leaf
    elif name in moments:
      parameter, _, slot = name.removeprefix(MOMENTS).rpartition("/")
      if slot != "m" or has_momentum:
        tree["opt_state", f"{slot}.{parameter.replace('/', '.')}"] = leaf
    elif name.startswith(OTHER_OPTIMIZER):
      tree["opt_state", name.removeprefix(OTHER_OPTIMIZER)] = leaf
    elif name != STEP:
      raise left_over_error("a training state of ours", name, leaf)
  if moments:
    tree.setdefault(("opt_state", _COUNT), step)
  return tree


def left_over_error(model: str, name: str, leaf: Leaf, *, fix: str = "") -> AnystepError:
  """Return the error for a leaf that a format has no name for."""
  return AnystepError(
    ExitCode.MISMATCH,
    "checkpoint_tree",
    leaf=name,
    expected=f"a leaf that {model} has",
    got=leaf.describe(),
    fix=fix or f"leave it out with --assign='{name}=>', or rename it",
  )


def check_activations(settings: Mapping[str, Any], expected: Sequence[str]) -> None:
  """Refuse settings with other activations than a model of Hugging Face's has.

  Raises:
    AnystepError: 78 `checkpoint_unsupported`.
  """
  names = settings.get("mlp_activations", expected)
  if list(names) != list(expected):
    raise unsupported_error(f"mlp_activations {list(expected)}", list(names))


def unsupported_error(expected: str, got: object, *, path: str | None = None) -> AnystepError:
  """Return the error for a model of Hugging Face's kind that has no counterpart on the other side."""
  return AnystepError(
    ExitCode.CONFIG,
    "checkpoint_unsupported",
    **({"path": path} if path else {}),
    expected=expected,
    got=got,
    fix="docs/checkpoints.md lists the models that can be converted",
  )
