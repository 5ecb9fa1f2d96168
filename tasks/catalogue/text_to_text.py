"""Tasks from one text to another, as T5 has them (Raffel et al. 2020, section 2.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import seqio
import tensorflow as tf

# That of the published T5 models, 32,100 ids. The file is looked for when a text is first encoded.
T5_VOCABULARY = seqio.SentencePieceVocabulary(
  "gs://t5-data/vocabs/cc_all.32000/sentencepiece.model", extra_ids=100
)
# The target of an example whose label is not published.
UNKNOWN = "<unk>"

Example = Mapping[str, tf.Tensor]


def add_task(
  name: str,
  source: seqio.DataSource,
  *,
  preprocessors: Sequence[Callable],
  vocabulary: seqio.Vocabulary,
  metric_fns: Sequence[Callable],
  postprocess_fn: Callable | None = None,
) -> None:
  """Registers a task whose examples get `inputs` and `targets` as texts.

  Their tokens and the texts are cached; they are cut to the feature lengths, and ended, when they are read.

  Args:
    name: of the task.
    source: of the examples.
    preprocessors: make the texts.
    vocabulary: of both texts.
    metric_fns: see `anystep.tasks.metrics`.
    postprocess_fn: makes of a text what the metrics compare.
  """
  seqio.TaskRegistry.add(
    name,
    source=source,
    preprocessors=[
      *preprocessors,
      seqio.preprocessors.tokenize,
      seqio.CacheDatasetPlaceholder(),
      seqio.preprocessors.append_eos_after_trim,
    ],
    output_features={key: seqio.Feature(vocabulary, add_eos=True) for key in ("inputs", "targets")},
    metric_fns=list(metric_fns),
    postprocess_fn=postprocess_fn,
  )


def described(task: str, columns: Sequence[tuple[str, tf.Tensor]]) -> tf.Tensor:
  """One text of a task's name and an example's texts, each after its own name: "rte sentence1: …"."""
  named = [part for name, text in columns for part in (f"{name}:", text)]
  return tf.strings.join([task, *named], separator=" ")


def label_text(label: tf.Tensor, labels: Sequence[str]) -> tf.Tensor:
  """The word of a label; `UNKNOWN` for -1, which stands where labels are not published."""
  return tf.gather(tf.constant([UNKNOWN, *labels]), label + 1)


@seqio.map_over_dataset
def classification(
  example: Example, *, task: str, columns: Mapping[str, str], labels: Sequence[str]
) -> dict[str, tf.Tensor]:
  """Texts to read in `inputs`, the word of their label in `targets`; `idx` is kept.

  Args:
    example: a row of the dataset, with `label` and `idx`.
    task: what the inputs begin with.
    columns: by the name that a text gets, the column that it is in; in the order of the inputs.
    labels: words of the labels 0, 1, ….
  """
  texts = [(name, example[column]) for name, column in columns.items()]
  return {
    "idx": example["idx"],
    "inputs": described(task, texts),
    "targets": label_text(example["label"], labels),
  }


def label_of(text: str, *, labels: Sequence[str], **unused: Any) -> int:
  """A postprocessor: the label that a text is the word of, -1 where it is of none.

  >>> label_of("positive", labels=("negative", "positive"))
  1
  >>> label_of("posit", labels=("negative", "positive"), is_target=False)
  -1
  """
  del unused
  return labels.index(text) if text in labels else -1
