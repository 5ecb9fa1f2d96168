"""Small tasks and mixtures to train on in tests; importing this module registers them."""

import functools
import random

import seqio
import tensorflow as tf

from anystep.tasks import metrics, preprocessors

NAME = "tiny_span_corruption"
OTHER_NAME = "tiny_other"
MIXTURE = "tiny_mixture"
MIXTURE_BY_SIZE = "tiny_mixture_by_size"
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


def _other_texts(split, shuffle_files, seed=None):
  del shuffle_files, seed
  texts = [f"{split} {k} " + "other " * (k % 9) for k in range(_EXAMPLES[split] // 3)]
  return tf.data.Dataset.from_tensor_slices({"targets": texts})


for name, texts in ((NAME, _texts), (OTHER_NAME, _other_texts)):
  seqio.TaskRegistry.add(
    name,
    source=seqio.FunctionDataSource(texts, splits=list(_EXAMPLES)),
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
seqio.MixtureRegistry.add(MIXTURE, [(NAME, 0.7), (OTHER_NAME, 0.3)])
seqio.MixtureRegistry.add(MIXTURE_BY_SIZE, [NAME, OTHER_NAME], default_rate=seqio.mixing_rate_num_examples)
