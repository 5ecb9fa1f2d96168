"""Some examples of a task at every stage, from the source to the model's features: how one debugs a task."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence

import seqio

from anystep.errors import AnystepError, ExitCode, find_nearest
from anystep.order.packing import PackingPolicy
from anystep.tasks.preview.followed_examples import (
  FollowedExamples,
  StepFailed,
  format_failure,
  has_split,
  source_errors,
  source_shard,
  source_shards,
)
from anystep.tasks.preview.stages import MODELS, ShownStages, describe_step
from anystep.tasks.preview.values import Preview, Stage
from anystep.tasks.reading.preprocessor_graph import validate
from anystep.tasks.vocabularies.decoding import vocabularies


def preview(
  task: seqio.Task,
  *,
  split: str,
  num_examples: int,
  source: str | None = None,
  skip: int = 0,
  base_seed: int = 0,
  feature_lengths: Mapping[str, int] | None = None,
  model: str | None = None,
  packing: PackingPolicy | str = PackingPolicy.NONE,
) -> Preview:
  """Follows examples through a task.

  Args:
    task: one that `check_previews` finds nothing wrong with.
    split: of its source.
    num_examples: how many examples of the source are followed.
    source: the source shard, by name or number; None for the one that skip leads to.
    skip: how many examples come before them: of the source shard, or of the split where that is None.
    base_seed: what random draws follow from, as `anystep-cache --base_seed`.
    feature_lengths: what preprocessors are told, and features cut to; None: nothing is cut and converted.
    model: whose features are made, one of `MODELS`; None for the one that the task's features fit.
    packing: how the examples share the model's rows.

  Returns:
    The stages, up to the one that failed, and then with its `error`: 65 `preprocessor_failed`, 78
    `output_features`, or what a preprocessor or converter raised that is one of ours.

  Raises:
    AnystepError: 64 `source`, `skip`; 66 `source_unreadable`, `source_empty`.
  """
  shard, skip = _find_first_example(task, split, source, skip)
  examples = FollowedExamples(
    task,
    split=split,
    source_shard=shard,
    skip=skip,
    num_examples=num_examples,
    base_seed=base_seed,
    feature_lengths=feature_lengths,
  )
  shard_name = source_shards(task, split)[shard]
  notes = [
    f"random draws are those of anystep-cache --base_seed={base_seed} for this source shard;",
    "below the cache those of --cache_at=end, where a reader of the cache draws by index and epoch",
  ]
  if feature_lengths is None:
    notes.append("without --feature_lengths nothing is cut, and no model's features are made")
  shown = ShownStages(task)
  stages = [shown.source(task.source, examples.now)]
  error = None
  for preprocessor in task.preprocessors:
    try:
      examples.step(preprocessor)
    except StepFailed as failure:
      stages.append(shown.failed(preprocessor, failure))
      where = {"task": task.name, "split": split, "source_shard": shard_name}
      error = _step_error(failure, {**where, "preprocessor": describe_step(preprocessor)[0]})
      break
    stages.append(shown.step(preprocessor, examples.now))
  else:
    error = _add_model_stages(stages, shown, task, examples, feature_lengths, model, PackingPolicy(packing))
  return Preview(
    task=task.name, split=split, source_shard=shard_name, notes=notes, stages=stages, error=error
  )


def _add_model_stages(
  stages: list[Stage],
  shown: ShownStages,
  task: seqio.Task,
  examples: FollowedExamples,
  feature_lengths: Mapping[str, int] | None,
  model: str | None,
  packing: PackingPolicy,
) -> AnystepError | None:
  """Adds what comes after the preprocessors; returns what is wrong with it."""
  try:
    validate(task, types.SimpleNamespace(element_spec=examples.now.spec))
    if feature_lengths is None or not examples.now.followed:
      return None
    model = model or _choose_model(task, feature_lengths)
    prefix = model == "prefix_lm" or (model == "decoder" and "inputs" in feature_lengths)
    stages.append(shown.trim(feature_lengths, joined=prefix and packing == PackingPolicy.NONE))
    stages.append(shown.model_rows(model, feature_lengths, packing))
  except AnystepError as error:
    error.fields = {"task": task.name, **error.fields}
    return error
  return None


def check_previews(
  tasks: Sequence[seqio.Task],
  *,
  split: str,
  feature_lengths: Mapping[str, int] | None = None,
  model: str | None = None,
) -> None:
  """Refuses what no preview can be made of; the arguments are those of `preview`.

  Raises:
    AnystepError: 64 `split_unknown`, `model`; 66 `vocabulary_missing`; 78 `feature_lengths`,
      `preprocessors_refused`.
  """
  feature_names = {name for task in tasks for name in task.output_features}
  for name in feature_lengths or {}:
    if name not in feature_names:
      raise _lengths_error(find_nearest(name, feature_names), name)
  for task in tasks:
    if not has_split(task, split):
      raise AnystepError(
        ExitCode.USAGE,
        "split_unknown",
        task=task.name,
        expected=find_nearest(split, task.splits),
        got=split,
        fix="name one of the task's splits with --split",
      )
    takes = MODELS[model or _choose_model(task, feature_lengths)]
    if missing := [name for name in takes if name not in task.output_features]:
      raise AnystepError(
        ExitCode.USAGE,
        "model",
        task=task.name,
        expected=f"a model for {', '.join(task.output_features)}",
        got=f"{model}, which takes {', '.join(missing)}",
        fix=f"choose --model={_choose_model(task, feature_lengths)}, or leave it out",
      )
    if feature_lengths is not None and not feature_lengths.keys() >= set(takes):
      raise _lengths_error(f"lengths of {', '.join(takes)}", ", ".join(feature_lengths), task=task.name)
    _check_preprocessors(task, feature_lengths)
    _check_vocabularies(task)


def _check_preprocessors(task: seqio.Task, feature_lengths: Mapping[str, int] | None) -> None:
  """Refuses what SeqIO refuses, and what cannot be called without lengths where there are none."""
  try:
    preprocessors = task.preprocessors
  except ValueError as error:
    raise AnystepError(
      ExitCode.CONFIG,
      "preprocessors_refused",
      task=task.name,
      got=format_failure(error),
      fix="move it below the placeholder",
    ) from error
  for preprocessor in preprocessors:
    if feature_lengths is None and _needs_lengths(preprocessor):
      name, _ = describe_step(preprocessor)
      names = ", ".join(task.output_features)
      raise _lengths_error(f"lengths of {names}", "none", task=task.name, preprocessor=name)


def _needs_lengths(preprocessor: Callable) -> bool:
  """Return whether a preprocessor requires SeqIO's sequence_length."""
  if isinstance(preprocessor, seqio.CacheDatasetPlaceholder):
    return False
  try:
    parameter = inspect.signature(preprocessor).parameters.get("sequence_length")
  except (TypeError, ValueError):
    return False
  return parameter is not None and parameter.default is inspect.Parameter.empty


def _lengths_error(expected: str, got: str, **where: str) -> AnystepError:
  return AnystepError(
    ExitCode.CONFIG,
    "feature_lengths",
    **where,
    expected=expected,
    got=got,
    fix='name each with its tokens: --feature_lengths=\'{"inputs": 512, "targets": 114}\'',
  )


def _check_vocabularies(task: seqio.Task) -> None:
  """Reads the vocabularies, which may lie anywhere."""
  for name, vocabulary in vocabularies({task.name: task})[task.name].items():
    try:
      _ = vocabulary.vocab_size
    except AnystepError:
      raise
    except Exception as error:
      raise AnystepError(
        ExitCode.NO_INPUT,
        "vocabulary_missing",
        task=task.name,
        feature=name,
        got=format_failure(error),
        fix="see to the vocabulary's file",
      ) from error


def _choose_model(task: seqio.Task, feature_lengths: Mapping[str, int] | None) -> str:
  """The model that takes the features that the task must have, and those it may have that have a length."""
  names = {
    name
    for name, feature in task.output_features.items()
    if feature.required or name in (feature_lengths or {})
  }
  if "targets" not in names:
    return "pass_through"
  return "encoder_decoder" if "inputs" in names else "lm"


def _find_first_example(task: seqio.Task, split: str, source: str | None, skip: int) -> tuple[int, int]:
  """The source shard of the first example, and its number in it."""
  names = source_shards(task, split)
  shards: Sequence[int] = range(len(names))
  if source is not None:
    if source in names:
      shards = [names.index(source)]
    elif source.isdecimal() and int(source) < len(names):
      shards = [int(source)]
    else:
      numbers = f"0 to {len(names) - 1}"
      raise AnystepError(
        ExitCode.USAGE,
        "source",
        task=task.name,
        split=split,
        expected=f"{find_nearest(source, names)}, or {numbers}",
        got=source,
        fix="correct --source: name one that is there, or its number",
      )
  before = 0
  for shard in shards:
    with source_errors(task, split):
      num_examples = sum(1 for _ in source_shard(task, split, shard).take(skip - before + 1))
    if num_examples > skip - before:
      return shard, skip - before
    before += num_examples
  if not before:
    raise AnystepError(
      ExitCode.NO_INPUT,
      "source_empty",
      task=task.name,
      split=split,
      expected="examples",
      got=f"none in {len(shards)} source shards",
      fix="see to the source's files, or choose another --split",
    )
  raise AnystepError(
    ExitCode.USAGE,
    "skip",
    task=task.name,
    split=split,
    expected=f"0 to {before - 1}",
    got=skip,
    fix="give --skip a number in this range",
  )


def _step_error(failure: StepFailed, where: Mapping[str, str]) -> AnystepError:
  if isinstance(failure.cause, AnystepError):
    failure.cause.fields = {**where, **failure.cause.fields}
    return failure.cause
  return AnystepError(
    ExitCode.DATA,
    "preprocessor_failed",
    **where,
    **({} if failure.label is None else {"example": failure.label}),
    got=failure.message,
    fix="mend the preprocessor, or what stands before it: the example that it was given is shown",
  )
