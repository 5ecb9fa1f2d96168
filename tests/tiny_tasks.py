"""A small task to train on in tests; importing this module registers it."""

import functools
import random

import seqio
import tensorflow as tf

from anystep.tasks import metrics, preprocessors

NAME = "tiny_span_corruption"
VOCABULARY = seqio.ByteVocabulary(extra_ids=125)
_EXAMPLES = {"train": 300, "validation": 21}


def _texts(split, shuffle_files, seed=None):
  del shuffle_files, seed
  words = random.Random(split)
  texts = [
    " ".join(
      words.choice(["def", "return", "self", "x", "yield", "None"]) for _ in range(words.randint(1, 40))
    )
    for _ in range(_EXAMPLES[split])
  ]
  return tf.data.Dataset.from_tensor_slices({"targets": texts})


seqio.TaskRegistry.add(
  NAME,
  source=seqio.FunctionDataSource(_texts, splits=list(_EXAMPLES)),
  preprocessors=[
    functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
    seqio.CacheDatasetPlaceholder(),
    preprocessors.span_corruption,
    seqio.preprocessors.append_eos,
  ],
  output_features={
    "inputs": seqio.Feature(VOCABULARY, add_eos=True),
    "targets": seqio.Feature(VOCABULARY, add_eos=True),
  },
  metric_fns=[metrics.edit_similarity, metrics.log_likelihood],
)
