"""The Colossal Clean Crawled Corpus, English, from TensorFlow Datasets (`c4/en:3.1.0`).

Importing this module registers `c4_span_corruption` (encoder-decoder) and `c4_lm` (decoder only), with T5's
vocabulary; with another one: `c4.register(vocabulary, prefix="mine_")`. 364,868,892 documents to train on and
364,608 to evaluate on, 830 GB. Licence: ODC-BY, and Common Crawl's terms of use. Source: Raffel et al. 2020,
section 2.2.

Whole documents are cached, and one document is one example: of a longer one each epoch takes a chunk at
another random place. T5's own pretraining joins documents and splits them anew: that is
`c4_v220_span_corruption` of the package t5, cached with `--cache_at=end`.
"""

from __future__ import annotations

import functools

import seqio

from anystep.tasks import metrics, preprocessors
from anystep.tasks.catalogue.text_to_text import T5_VOCABULARY
from anystep.tasks.sources.tfds_source import TfdsSource


def register(vocabulary: seqio.Vocabulary = T5_VOCABULARY, *, prefix: str = "") -> None:
  """Registers the tasks.

  Args:
    vocabulary: of inputs and targets; span corruption takes its sentinels from the last ids.
    prefix: of their names.
  """
  source = TfdsSource("c4/en:3.1.0", ("train", "validation"))
  cached = (
    functools.partial(seqio.preprocessors.rekey, key_map={"targets": "text"}),
    functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
    seqio.CacheDatasetPlaceholder(),
  )
  text = seqio.Feature(vocabulary, add_eos=True)
  seqio.TaskRegistry.add(
    f"{prefix}c4_span_corruption",
    source=source,
    preprocessors=[*cached, preprocessors.span_corruption, seqio.preprocessors.append_eos],
    output_features={"inputs": text, "targets": text},
    metric_fns=[metrics.edit_similarity, metrics.log_likelihood],
  )
  seqio.TaskRegistry.add(
    f"{prefix}c4_lm",
    source=source,
    # The end comes before the chunk: it is learned where a document ends, and not where a chunk does.
    preprocessors=[*cached, seqio.preprocessors.append_eos, preprocessors.random_chunk],
    output_features={"targets": text},
    metric_fns=[metrics.bits_per_byte, metrics.log_likelihood],
  )


register()
