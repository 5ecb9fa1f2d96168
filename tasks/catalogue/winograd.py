"""The Winograd schema challenge as T5 has it: what a pronoun means (Raffel et al. 2020, section 2.4)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import seqio
import tensorflow as tf

from anystep.tasks.catalogue.text_to_text import Example

_DETERMINER = re.compile(
  "a|an|few|her|his|each|every|many|much|my|our|some|that|the|their|these|this|those|which|whose|your"
)


def wsc(dataset: tf.data.Dataset, *, referents_only: bool) -> tf.data.Dataset:
  """WSC: a text with one pronoun between stars; the target is the noun of the example.

  Args:
    dataset: rows of WSC.
    referents_only: leaves out examples whose pronoun means something else than the noun: to train on.
  """

  @seqio.map_over_dataset
  def with_stars(example: Example) -> dict[str, tf.Tensor]:
    return {
      "idx": example["idx"],
      "inputs": tf.strings.join(["wsc:", _starred(example)], separator=" "),
      "label": example["label"],
      "targets": example["span1_text"],
    }

  if referents_only:
    dataset = dataset.filter(lambda example: example["label"] == 1)
  return with_stars(dataset)


def _starred(example: Example) -> tf.Tensor:
  """The text with its pronoun between stars.

  In two texts of the data the word at the pronoun's index is another: the one before it, or the pronoun with
  the mark that follows.
  """
  words, pronoun = tf.strings.split(example["text"], sep=" "), example["span2_text"]
  length = tf.strings.length(pronoun)
  place = example["span2_index"]
  place += tf.cast(tf.strings.substr(words[place], 0, length) != pronoun, place.dtype)
  found = tf.strings.substr(words[place], 0, length)
  with tf.control_dependencies(
    [tf.debugging.assert_equal(found, pronoun, message="not the pronoun's index")]
  ):
    marks = tf.strings.substr(words[place], length, tf.strings.length(words[place]))
  middle = tf.strings.join(["*", pronoun, "*"])[None]
  has_marks = tf.strings.length(marks) > 0
  middle = tf.cond(has_marks, lambda: tf.concat([middle, marks[None]], axis=0), lambda: middle)
  text = tf.strings.reduce_join(tf.concat([words[:place], middle, words[place + 1 :]], axis=0), separator=" ")
  return tf.cond(has_marks, lambda: tf.strings.strip(text), lambda: text)


def is_referent(text: str, *, example: Mapping[str, Any], is_target: bool, **unused: Any) -> int:
  """A postprocessor: the label of targets; of predictions whether they name the noun, -1 where empty.

  A prediction names the noun where the words of one are among the other's, but for case and determiners, and
  neither or both have an apostrophe: "Bob" is not "Bob's hat".
  """
  del unused
  if is_target:
    return int(example["label"])
  said, noun = (_plain_words(part) for part in (text, example["targets_pretokenized"].decode()))
  if not said:
    return -1
  same_apostrophe = any("'" in word for word in said) == any("'" in word for word in noun)
  return int(same_apostrophe and bool(noun) and (said <= noun or noun <= said))


def _plain_words(text: str) -> set[str]:
  return {word for word in text.lower().split() if not _DETERMINER.fullmatch(word)}
