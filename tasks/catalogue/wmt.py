"""WMT 2014 English to German as T5 has it, from TensorFlow Datasets (`wmt14_translate/de-en:1.0.0`).

Importing this module registers `wmt14_ende`, with T5's vocabulary; with another one:
`wmt.register(vocabulary, prefix="mine_")`. 4,508,785 training examples, 1.4 GB; newstest2013 and 2014 to
evaluate on. Licence: Europarl, Common Crawl and News Commentary have their own.
Source: Bojar et al. 2014, https://www.statmt.org/wmt14/translation-task.html. The metric needs the package
sacrebleu.
"""

from __future__ import annotations

import functools

import seqio
import tensorflow as tf

from anystep.tasks import metrics
from anystep.tasks.catalogue.text_to_text import T5_VOCABULARY, Example, add_task
from anystep.tasks.sources.tfds_source import TfdsSource

_LANGUAGES = {"de": "German", "en": "English"}


@seqio.map_over_dataset
def translation(example: Example, *, source: str, target: str) -> dict[str, tf.Tensor]:
  """A sentence after "translate … to …: " in `inputs`, its translation in `targets`.

  Args:
    example: a text by each language's code.
    source: the code of the language to translate from.
    target: that of the language to translate to.
  """
  task = f"translate {_LANGUAGES[source]} to {_LANGUAGES[target]}: "
  return {"inputs": tf.strings.join([task, example[source]]), "targets": example[target]}


def register(vocabulary: seqio.Vocabulary = T5_VOCABULARY, *, prefix: str = "") -> None:
  """Registers the task.

  Args:
    vocabulary: of inputs and targets.
    prefix: of its name.
  """
  add_task(
    f"{prefix}wmt14_ende",
    TfdsSource("wmt14_translate/de-en:1.0.0", ("train", "validation", "test")),
    preprocessors=[functools.partial(translation, source="en", target="de")],
    vocabulary=vocabulary,
    metric_fns=[metrics.bleu],
  )


register()
