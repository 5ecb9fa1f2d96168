"""Registered tasks that a configuration names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import seqio

from anystep.errors import AnystepError, ExitCode
from anystep.tasks.registry.modules import import_modules
from anystep.tasks.registry.named_tasks import NamedTasks, find_named_tasks, find_registered, find_task
from anystep.train.configuration.resume_contract import list_differences
from anystep.train.datasets.config import DatasetConfig
from anystep.train.datasets.configured_caches import check_cache_options
from anystep.transforms.identity import describe

_NAME_FIX = "correct MIXTURE_OR_TASK_NAME, or name the module that registers it in MIXTURE_OR_TASK_MODULE"


def find_configured_tasks(config: DatasetConfig) -> NamedTasks:
  """Import the modules and return the tasks that a configuration names, with all its cache directories.

  Raises:
    AnystepError: 78 `module_import`; as `check_cache_options` and `find_named_tasks`.
  """
  import_modules(config.modules)
  check_cache_options(config)
  named = find_named_tasks(config.mixture_or_task_name, config.split, fix=_NAME_FIX)
  others = (root for root in config.cache_dirs if root not in named.cache_dirs)
  return dataclasses.replace(named, cache_dirs=(*named.cache_dirs, *others))


def split_by_task(config: DatasetConfig) -> list[DatasetConfig]:
  """Return a configuration for each task of a registered mixture; of anything else the configuration itself.

  Raises:
    AnystepError: as `find_configured_tasks`.
  """
  named = find_configured_tasks(config)
  if not isinstance(named.rates, seqio.Mixture):
    return [config]
  return [dataclasses.replace(config, mixture_or_task_name=name) for name in named.tasks]


def find_configured(config: DatasetConfig) -> seqio.Task | seqio.Mixture:
  """Return the registered task or mixture that a configuration names.

  Raises:
    AnystepError: 64 `task_unknown`.
  """
  return find_registered(config.mixture_or_task_name, fix=_NAME_FIX)


def find_planned_task(name: str) -> seqio.Task:
  """Return the registered task that a plan names.

  Raises:
    AnystepError: 64 `task_unknown`.
  """
  return find_task(name, fix=_NAME_FIX)


def check_lengths(task: seqio.Task, lengths: Mapping[str, int]) -> None:
  """Refuse lengths that lack a required feature of a task.

  Raises:
    AnystepError: 78 `feature_length`.
  """
  features = [name for name, feature in task.output_features.items() if feature.required and feature.rank]
  missing = [name for name in features if name not in lengths]
  if missing:
    raise AnystepError(
      ExitCode.CONFIG,
      "feature_length",
      task=task.name,
      expected=f"lengths for {', '.join(features)}",
      got=dict(lengths),
      fix=f"add {', '.join(missing)} to TASK_FEATURE_LENGTHS",
    )


def check_vocabularies(
  tasks: Mapping[str, seqio.Task], vocabularies: Mapping[str, Any], vocab_size: int | None
) -> None:
  """Refuse a model whose vocabulary is not the tasks', or has fewer ids than theirs.

  Args:
    tasks: the tasks by name.
    vocabularies, vocab_size: see `anystep.train.models.base.Model`.

  Raises:
    AnystepError: 78 `vocabulary`, `vocab_size`.
  """
  features = [
    (task, name, task.output_features[name].vocabulary)
    for task in tasks.values()
    for name in vocabularies
    if name in task.output_features
  ]
  for task, name, vocabulary in features:
    if vocabularies[name] is not None and vocabulary != vocabularies[name]:
      raise AnystepError(
        ExitCode.CONFIG,
        "vocabulary",
        task=task.name,
        feature=name,
        expected="the task's vocabulary",
        got="; ".join(list_differences(describe(vocabulary), describe(vocabularies[name]))),
        fix="set VOCABULARY to the task's",
      )
    if vocab_size is not None and vocabulary.vocab_size > vocab_size:
      raise AnystepError(
        ExitCode.CONFIG,
        "vocab_size",
        task=task.name,
        expected=f"at least {vocabulary.vocab_size}",
        got=vocab_size,
        fix="enlarge the network's vocab_size",
      )
