"""T5X's training data in the plan's order. Needs SeqIO.

T5X's own code stays as it is; its gin file needs:

    from anystep import t5x as anystep_t5x

    train_script.train.get_dataset_fn = @anystep_t5x.get_deterministic_dataset
    anystep_t5x.get_deterministic_dataset.model_dir = %MODEL_DIR
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import seqio
import tensorflow as tf
from etils import epath

from anystep.errors import AnystepError, ExitCode
from anystep.files.names import checkpoint_step
from anystep.tasks.registry.modules import import_modules
from anystep.tasks.seqio_api.converters import native_converter
from anystep.tasks.seqio_api.deterministic_task import open_cached_tasks, order_options
from anystep.tasks.seqio_api.step_datasets import steps_dataset

_PREFETCH_BATCHES = 8


def get_deterministic_dataset(
  cfg: Any,
  shard_id: int,
  num_shards: int,
  feature_converter_cls: Callable[..., seqio.FeatureConverter],
  num_epochs: int | None = None,
  continue_from_last_checkpoint: bool = True,
  model_dir: epath.PathLike | None = None,
  start_step: int = 0,
) -> tf.data.Dataset:
  """Return a host's batches; element k is its part of the batch of step start + k.

  Training continues at step `start`: the newest checkpoint's, or else `start_step`. The rows of all shards,
  in the order of shard_id, are the batch that every reader of the plan gets for that step. T5X defines the
  parameters' names and order.

  Args:
    cfg: a `t5x.utils.DatasetConfig`, whose name may be a mixture of caches as MaxText writes it. If `shuffle`
      is true, each epoch has its own order; `seed` None is 0; with `pack`, each row holds as many examples
      as fit (`best_fit`).
    shard_id, num_shards: this host's share of a batch, and the number of equal shares.
    feature_converter_cls: makes the model's features; called with `pack` and `use_custom_packing_ops`.
    num_epochs: None or -1 for no end. Rows of the last batch without data are zeros.
    continue_from_last_checkpoint: whether to start at the step of the newest checkpoint in `model_dir`.
    model_dir: T5X's model directory.
    start_step: the first step if there is no checkpoint to continue from. For fine-tuning, give the step of
      the checkpoint that it starts from, so that a resumed run continues at the right step.

  Raises:
    AnystepError: 78 `use_cached`, `model_dir`; 78 `rows` if num_shards does not divide the batch; 78
      `data_ended` for a start after the data's end; as `open_cached_tasks` and `Plan.start`.
  """
  if not cfg.use_cached:
    raise _configuration_error(
      "use_cached", expected=True, got=cfg.use_cached, fix="set USE_CACHED_TASKS = True"
    )
  import_modules([cfg.module] if getattr(cfg, "module", None) else [])
  if continue_from_last_checkpoint:
    start_step = _find_last_step(model_dir, start_step)
  cached = open_cached_tasks(cfg.mixture_or_task_name, cfg.split, cfg.task_feature_lengths)
  plan = cached.start_plan(
    batch_size=cfg.batch_size,
    packing="best_fit" if cfg.pack else "none",
    **order_options(shuffle=cfg.shuffle, seed=cfg.seed, num_epochs=num_epochs),
  )
  converter = feature_converter_cls(
    pack=cfg.pack, use_custom_packing_ops=getattr(cfg, "use_custom_packing_ops", False)
  )
  rows = (shard_id, num_shards)
  stream = cached.open_stream(plan, rows, feature_converter=native_converter(converter))
  form = stream.batch(start_step)
  dataset = steps_dataset(stream.batch, form, steps=range(start_step, plan.num_steps or tf.int64.max))
  shapes = {name: values.shape for name, values in form.items() if isinstance(values, np.ndarray)}
  dataset = dataset.map(
    lambda batch: {**batch, **{name: tf.ensure_shape(batch[name], shapes[name]) for name in shapes}}
  )
  return dataset.prefetch(_PREFETCH_BATCHES)


def _find_last_step(model_dir: epath.PathLike | None, start_step: int) -> int:
  """Return the step of the newest checkpoint, which T5X will restore; start_step if there is none."""
  if model_dir is None:
    raise _configuration_error(
      "model_dir",
      expected="T5X's model_dir, to find its newest checkpoint in",
      got=None,
      fix="bind anystep.t5x.get_deterministic_dataset.model_dir = %MODEL_DIR, or"
      " continue_from_last_checkpoint = False",
    )
  directory = epath.Path(model_dir)
  steps = [checkpoint_step(entry.name) for entry in directory.iterdir()] if directory.is_dir() else []
  return max((step for step in steps if step is not None), default=start_step)


def _configuration_error(kind: str, *, expected: object, got: object, fix: str) -> AnystepError:
  return AnystepError(ExitCode.CONFIG, kind, expected=expected, got=got, fix=fix)
