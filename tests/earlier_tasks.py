"""Tasks whose caches an earlier version made; their files are those of tests/fixtures/version_0_1."""

import functools

import seqio
import tensorflow as tf

from anystep.tasks import metrics, preprocessors, text_task
from anystep.tasks.catalogue import copying
from anystep.tasks.sources.in_place import ArrayRecordDataSource, ParquetDataSource

NAMES = ("early_texts", "early_reverse_3", "early_spans", "early_parquet", "early_records")
VOCABULARY = seqio.ByteVocabulary(extra_ids=125)


def _numbers(split, shuffle_files, seed=None):
  del shuffle_files, seed
  count = {"train": 30, "validation": 7}[split]
  texts = [f"{split} {number} " + "and so on " * (number % 4) for number in range(count)]
  return tf.data.Dataset.from_tensor_slices({"targets": texts})


text_task(
  "early_texts",
  {"train": "texts/train-*.jsonl", "validation": "texts/validation.jsonl"},
  vocabulary=VOCABULARY,
  piece_tokens=16,
)
copying.add_task("reverse", 3, letters="abcde", train_examples=40, held_out_examples=8, prefix="early_")
seqio.TaskRegistry.add(
  "early_spans",
  source=seqio.FunctionDataSource(_numbers, splits=("train", "validation")),
  preprocessors=[
    functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
    seqio.CacheDatasetPlaceholder(),
    functools.partial(preprocessors.span_corruption, noise_density=0.25),
    seqio.preprocessors.append_eos,
  ],
  output_features={
    "inputs": seqio.Feature(VOCABULARY, add_eos=True),
    "targets": seqio.Feature(VOCABULARY, add_eos=True),
  },
  metric_fns=[metrics.edit_similarity],
)
for _name, _source in (
  ("early_parquet", ParquetDataSource({"train": "caches/rows/rows.parquet"}, columns=["targets"])),
  ("early_records", ArrayRecordDataSource({"train": "caches/rows/rows.array_record"}, columns=["targets"])),
):
  seqio.TaskRegistry.add(
    _name,
    source=_source,
    preprocessors=[seqio.CacheDatasetPlaceholder(), seqio.preprocessors.tokenize, preprocessors.lm],
    output_features={"targets": seqio.Feature(VOCABULARY, add_eos=True)},
  )
seqio.MixtureRegistry.add("early_mixture", [("early_texts", 0.6), ("early_spans", 0.4)])
