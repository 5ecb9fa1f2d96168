"""A task from files of texts, in one line."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import seqio

from anystep.errors import AnystepError, ExitCode, find_nearest
from anystep.tasks import metrics, preprocessors
from anystep.tasks.sources.held_out_source import HeldOutDataSource
from anystep.tasks.sources.huggingface_source import HuggingFaceDataSource, is_saved_dataset
from anystep.tasks.sources.rows_source import FilesSource
from anystep.tasks.text_formats import find_format, open_source

Patterns = str | Iterable[str]

PIECE_TOKENS = 512
_HUB = "hf://"
# By what becomes of a text's end, what cuts it.
_CUTS: Mapping[str, Callable] = {
  "short": preprocessors.cut_into_token_pieces,
  "balanced": preprocessors.cut_into_balanced_pieces,
}
# By style, what runs at reading, what has an end token, and the metrics.
_AT_READING: Mapping[str, Sequence[Callable]] = {
  "lm": (preprocessors.lm,),
  "prefix_lm": (preprocessors.prefix_lm,),
  "span_corruption": (preprocessors.span_corruption, seqio.preprocessors.append_eos),
}
_ENDED: Mapping[str, Mapping[str, bool]] = {
  "lm": {"targets": True},
  "prefix_lm": {"inputs": False, "targets": True},
  "span_corruption": {"inputs": True, "targets": True},
}
_METRICS: Mapping[str, Sequence[Callable]] = {
  "lm": (metrics.bits_per_byte, metrics.log_likelihood),
  "prefix_lm": (metrics.edit_similarity, metrics.log_likelihood),
  "span_corruption": (metrics.edit_similarity, metrics.log_likelihood),
}


def text_task(
  name: str,
  files: Patterns | Mapping[str, Patterns] | FilesSource | HuggingFaceDataSource,
  *,
  vocabulary: seqio.Vocabulary,
  column: str = "text",
  style: str = "span_corruption",
  validation: Patterns | None = None,
  validation_examples: int = 0,
  piece_tokens: int | None = PIECE_TOKENS,
  tails: str = "short",
  file_format: str | None = None,
  metric_fns: Sequence[Callable] | None = None,
) -> seqio.Task:
  """Registers a SeqIO task that learns from texts in files.

  Before the cache, texts are tokenized and cut into pieces, so that nothing of a long one is thrown away and
  the cache has what the model reads at a time. At reading, each piece becomes an example of the style, with
  other random draws in every epoch. Empty texts are left out.

  | style | features | of a piece, by the preprocessor of `anystep.tasks.preprocessors` |
  |---|---|---|
  | `span_corruption` | `inputs`, `targets` | it without random spans, and these (`span_corruption`) |
  | `lm` | `targets` | itself, for a decoder (`lm`) |
  | `prefix_lm` | `inputs`, `targets` | its beginning and its rest, random (`prefix_lm`) |

  With `lm` and `prefix_lm` an end token ends each text, with `span_corruption` both features.

  Args:
    name: of the task.
    files: a pattern of files, or several, which are split `train`, or these by split; `hf://` and a name on
      the Hugging Face hub, or a directory of `datasets`' `save_to_disk`, with the splits that it has; or a
      source of `anystep.tasks.sources`. The ending says the format: .jsonl, .json (an object a line), .csv,
      .tsv, .txt (a text a line), .parquet, .arrow, .feather, .array_record (`tf.train.Example`).
    vocabulary: makes tokens of texts; for `span_corruption` with `extra_ids`.
    column: of the texts; of .txt files their lines.
    style: `span_corruption`, `lm` or `prefix_lm`.
    validation: files of split `validation`, in the same format.
    validation_examples: where there are none, so many texts of `train` that are held out for it: the first
      ones of each file (`sources.HeldOutDataSource`), before anything is cut.
    piece_tokens: length of a piece: what the model reads at a time, such as 568 for T5's lengths 512 and 114.
      None to keep texts whole; of one that is longer than the model reads, each epoch then takes one chunk.
    tails: `short`: pieces are of this length, and the last one of a text is what is left of it. `balanced`: a
      text's pieces are as few, and their lengths differ by a token at most.
    file_format: the ending that stands for the format, where files have another.
    metric_fns: in place of those of the style.

  Returns:
    The task, which `seqio.TaskRegistry` knows by its name from now on.

  Raises:
    AnystepError: 78 `style_unknown`, `format_unknown`, `formats_differ`, `sentinels`, `tails_unknown`,
      `options_exclusive`.
      What is wrong with files and columns shows when the task is first used: see `RowsSource`.
  """
  if style not in _AT_READING:
    raise AnystepError(
      ExitCode.CONFIG,
      "style_unknown",
      task=name,
      expected=", ".join(_AT_READING),
      got=style,
      fix=f"name one of these, such as {find_nearest(style, _AT_READING, limit=1)}",
    )
  if style == "span_corruption" and not vocabulary.extra_ids:
    raise AnystepError(
      ExitCode.CONFIG,
      "sentinels",
      task=name,
      expected="a vocabulary with sentinels for spans, extra_ids=100 or so",
      got=f"extra_ids={vocabulary.extra_ids}",
      fix="give the vocabulary extra_ids, or choose another style",
    )
  if tails not in _CUTS:
    raise AnystepError(
      ExitCode.CONFIG,
      "tails_unknown",
      task=name,
      expected=" or ".join(_CUTS),
      got=tails,
      fix=f"name one of these, such as {find_nearest(str(tails), _CUTS, limit=1)}",
    )
  if piece_tokens is None and tails != "short":
    raise _exclusive(name, "tails", "piece_tokens=None, which cuts nothing")
  source = _source(name, files, column=column, validation=validation, file_format=file_format)
  if validation_examples:
    if "validation" in source.splits:
      raise _exclusive(name, "validation_examples", "a split validation")
    source = HeldOutDataSource(source, validation_examples)
  ended = _ENDED[style]
  ends_texts = style != "span_corruption"
  steps: list[Callable] = [
    functools.partial(seqio.preprocessors.rekey, key_map={"targets": column}),
    preprocessors.without_empty_texts,
    functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
  ]
  if ends_texts:
    steps.append(seqio.preprocessors.append_eos)
  if piece_tokens is not None:
    steps.append(functools.partial(_CUTS[tails], piece_tokens=piece_tokens))
  return seqio.TaskRegistry.add(
    name,
    source=source,
    preprocessors=[*steps, seqio.CacheDatasetPlaceholder(), *_AT_READING[style]],
    output_features={
      feature: seqio.Feature(vocabulary, add_eos=add_eos) for feature, add_eos in ended.items()
    },
    metric_fns=list(_METRICS[style] if metric_fns is None else metric_fns),
  )


def _source(
  task: str, files: Any, *, column: str, validation: Patterns | None, file_format: str | None
) -> Any:
  """The source of what the caller names."""
  is_dataset = isinstance(files, (str, os.PathLike)) and (
    str(files).startswith(_HUB) or is_saved_dataset(str(files))
  )
  if isinstance(files, seqio.DataSource) or is_dataset:
    for option, value in (("validation", validation), ("file_format", file_format)):
      if value is not None:
        raise _exclusive(task, option, "a source or dataset that has its own")
    return HuggingFaceDataSource(str(files).removeprefix(_HUB), columns=[column]) if is_dataset else files
  by_split = dict(files) if isinstance(files, Mapping) else {"train": files}
  if validation is not None:
    if "validation" in by_split:
      raise _exclusive(task, "validation", "files of that split")
    by_split["validation"] = validation
  by_split = {split: _patterns(patterns) for split, patterns in by_split.items()}
  formats = {
    pattern: find_format(file_format or pattern, option="file_format=", task=task)
    for patterns in by_split.values()
    for pattern in patterns
  }
  if len(set(formats.values())) > 1:
    raise AnystepError(
      ExitCode.CONFIG,
      "formats_differ",
      task=task,
      expected="files of one format",
      got=", ".join(f"{pattern}: {kind}" for pattern, kind in formats.items()),
      fix="register a task for each, and a mixture of them",
    )
  return open_source(next(iter(formats.values())), by_split, column)


def _patterns(patterns: Any) -> list[str]:
  return [str(p) for p in ([patterns] if isinstance(patterns, (str, os.PathLike)) else patterns)]


def _exclusive(task: str, option: str, other: str) -> AnystepError:
  return AnystepError(
    ExitCode.CONFIG,
    "options_exclusive",
    task=task,
    expected=f"either {option} or {other}",
    got="both",
    fix=f"leave {option} out",
  )
