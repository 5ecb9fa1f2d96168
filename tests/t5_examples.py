"""Made-up examples in the columns of TensorFlow Datasets."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

NAMES = ("Anna", "Bob", "Carla", "David", "Emma", "Frank")
NOUNS = ("apple", "bridge", "castle", "dog", "engine", "forest", "garden", "house", "island", "jacket")
_WORDS = """
  the of and a in was it for with as on that by at from his her an were which but had not one first been
  who they their she has all after its he two time new when also other more about there into only some
  years made most over city during many before between known where state under part world used second
  being through until well later same three each area several number small river team large game school
  music since work found day early water light open north south every never against long still
"""
WORDS = tuple(_WORDS.split())


@functools.cache
def columns(dataset: str) -> tfds.features.FeaturesDict:
  """A dataset's columns as TensorFlow Datasets declares them; nothing is downloaded."""
  known = "c4/en" if dataset.startswith("c4/") else dataset
  return tfds.builder(known, data_dir=tempfile.gettempdir(), try_gcs=False).info.features


def is_labelled(dataset: str, split: str) -> bool:
  """Most test splits are not."""
  return "test" not in split or dataset.startswith(("cnn_dailymail", "definite_pronoun_resolution", "wmt"))


def example(dataset: str, split: str, number: int) -> dict[str, Any]:
  """A split's example as its columns want it, the same each time."""
  rng = random.Random(f"{dataset} {split} {number}")
  labelled = is_labelled(dataset, split)
  makers = [maker for prefix, maker in _MAKERS.items() if dataset.startswith(prefix)]
  given: dict[str, Any] = makers[-1](rng, number, labelled) if makers else {}
  spec = columns(dataset).get_tensor_spec()
  if "label" in spec:
    num_classes = getattr(columns(dataset)["label"], "num_classes", None)
    label = rng.uniform(0, 5) if num_classes is None else rng.randrange(num_classes)
    given = {"label": label if labelled else -1, "idx": number, **given}
  return _filled(spec, given, rng)


def _filled(spec: Any, given: Any, rng: random.Random) -> Any:
  """What is given, in the columns' dtypes, and something in those that have nothing."""
  if isinstance(spec, Mapping):
    given = given or {}
    return {name: _filled(column, given.get(name), rng) for name, column in spec.items()}
  if given is None and spec.dtype == tf.string:
    given = [text(rng, 6) for _ in range(2)] if spec.shape.rank else text(rng, rng.randint(1, 16))
  elif given is None:
    given = [1, 2] if spec.shape.rank else rng.randrange(100)
  if spec.dtype == tf.string:
    encoded = [item.encode() for item in given] if spec.shape.rank else given.encode()
    return np.array(encoded, object) if spec.shape.rank else encoded
  return np.asarray(given, spec.dtype.as_numpy_dtype)


def text(rng: random.Random, num_words: int) -> str:
  words = [*rng.choices(WORDS, k=num_words), *rng.choices(NOUNS, k=num_words // 4)]
  rng.shuffle(words)
  return " ".join(words).capitalize() + "."


def _documents(rng, number, labelled):
  del labelled
  # Every web crawl has an empty page.
  return {"text": "" if number == 5 else text(rng, rng.choice((3, 20, 90)))}


def _articles(rng, number, labelled):
  del number, labelled
  return {"article": text(rng, rng.randint(20, 90)), "highlights": f"{text(rng, 6)} {text(rng, 4)}"}


def _questions_on_a_page(rng, number, labelled):
  del labelled
  words = text(rng, rng.randint(12, 60)).rstrip(".").split()
  # Metrics leave articles out, and know no answer of nothing else.
  starts = [place for place, word in enumerate(words[:-3]) if word.lower() not in ("a", "an", "the")]
  start = rng.choice(starts)
  # Of some, the answer is not in the page as words.
  answer = "nowhere else" if number % 7 == 6 else " ".join(words[start : start + rng.randint(1, 2)])
  answers = [answer, *(["something else"] if number % 3 else [])]
  return {"context": " ".join(words), "answers": {"text": answers, "answer_start": [start] * len(answers)}}


def _trivia(rng, number, labelled):
  answers = rng.sample(NOUNS, 2) if labelled else []
  pages = [f"{text(rng, 30)} {rng.choice(NOUNS)} {text(rng, 30)}" for _ in range(1 + number % 2)]
  found = [f"{text(rng, 5)} {rng.choice(NOUNS)}." for _ in range(number % 3)]
  return {
    "answer": {"normalized_aliases": answers, "aliases": answers},
    "entity_pages": {"wiki_context": pages},
    "search_results": {"search_context": found},
  }


def _grouped_answers(rng, number, labelled):
  idx = {"paragraph": number // 6, "question": number // 3, "answer": number % 3}
  return {"idx": idx, "paragraph": f"<b>{text(rng, 20)}</b><br>{text(rng, 8)}"}


def _placeholders(rng, number, labelled):
  entities = rng.sample(NAMES, 4)
  return {
    "idx": {"passage": number // 2, "query": number},
    "passage": f"{text(rng, 20)}\n@highlight\n{text(rng, 5)}",
    "query": f"{text(rng, 5)} @placeholder {text(rng, 3)}",
    "entities": entities,
    "answers": entities[: 1 + number % 3] if labelled else [],
  }


def _pronouns(rng, number, labelled):
  first, second = rng.sample(NAMES, 2)
  words = f"{first} asked {second} whether she had seen the {rng.choice(NOUNS)} .".split()
  place = words.index("she")
  spans = {"span1_text": (first, second)[number % 2], "span1_index": 0, "span2_text": "she"}
  return {"text": " ".join(words), "span2_index": place, **spans}


def _definite_pronouns(rng, number, labelled):
  del number, labelled
  candidates = rng.sample(NAMES, 2)
  sentence = f"{candidates[0]} asked {candidates[1]} if he can lend a {rng.choice(NOUNS)}."
  return {"sentence": sentence, "pronoun": "he", "candidates": candidates}


def _implied_nouns(rng, number, labelled):
  del number, labelled
  first, second = rng.sample(NOUNS, 2)
  adjective = rng.choice(("large", "small", "new"))
  first_sentence = f"The {first} stood near the {second}. It was {adjective}."
  return {"sentence1": first_sentence, "sentence2": f"The {second} was {adjective}."}


_MAKERS = {
  "c4/": _documents,
  "wikipedia/": _documents,
  "cnn_dailymail": _articles,
  "squad/": _questions_on_a_page,
  "trivia_qa/": _trivia,
  "super_glue/multirc": _grouped_answers,
  "super_glue/record": _placeholders,
  "super_glue/wsc": _pronouns,
  "definite_pronoun_resolution": _definite_pronouns,
  "glue/wnli": _implied_nouns,
}
