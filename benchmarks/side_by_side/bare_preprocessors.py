"""A task's source and preprocessors before the cache, with nothing behind them.

`python -m side_by_side.bare_preprocessors FORM` prints one line of JSON: examples, the seconds that they
took, and those of the imports before.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

BATCH_EXAMPLES = 1024


def dataset(shard_info: Any = None) -> Any:
  """The examples that are cached as a tf.data dataset; of all source shards in turns where none is named."""
  import seqio
  from side_by_side import cache_task

  task = seqio.TaskRegistry.get(cache_task.TASK)
  source = task.source.get_dataset(split=cache_task.SPLIT, shuffle=False, shard_info=shard_info)
  return task.preprocess_precache(source, seed=0)


def example_by_example() -> int:
  """Takes each into Python as numpy arrays, as SeqIO's job does; returns their number."""
  return sum(1 for _ in dataset().prefetch(_autotune()).as_numpy_iterator())


def in_batches() -> int:
  """Takes ragged batches into Python."""
  return _count_in_batches(dataset())


def shards_in_batches() -> int:
  """As `in_batches`, source shard by source shard, one on each core at a time.

  Steps as small as these are quickest where a core runs all of a shard's: threads that hand them to each
  other wait more than they work.
  """
  import seqio
  from side_by_side import cache_task

  number = len(seqio.TaskRegistry.get(cache_task.TASK).source.list_shards(cache_task.SPLIT))
  datasets = [dataset(seqio.ShardInfo(k, number)) for k in range(number)]
  with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
    return sum(threads.map(lambda one: _count_in_batches(one, tf_data_threads=1), datasets))


def within_tensorflow() -> int:
  """Counts them in TensorFlow's own loop: none comes to Python."""
  import tensorflow as tf

  count = dataset().prefetch(_autotune()).reduce(tf.constant(0, tf.int64), lambda count, _: count + 1)
  return int(count.numpy())


def _count_in_batches(examples: Any, *, tf_data_threads: int = 0) -> int:
  """Counts them batch by batch; 0 threads are those that TensorFlow has for all datasets."""
  import tensorflow as tf

  options = tf.data.Options()
  options.threading.private_threadpool_size = tf_data_threads
  batches = examples.ragged_batch(BATCH_EXAMPLES).prefetch(_autotune()).with_options(options)
  return sum(int(batch["targets"].nrows()) for batch in batches)


FORMS: dict[str, Callable[[], int]] = {
  "numpy, example by example": example_by_example,
  "ragged batches": in_batches,
  "ragged batches, a source shard on each core": shards_in_batches,
  "within TensorFlow": within_tensorflow,
}


def _autotune() -> int:
  import tensorflow as tf

  return tf.data.AUTOTUNE


def main() -> None:
  """Iterates over the examples once."""
  start = time.perf_counter()
  from side_by_side import cache_task  # noqa: F401 - its imports are what is timed

  imported = time.perf_counter()
  examples = FORMS[sys.argv[1]]()
  end = time.perf_counter()
  result = {"examples": examples, "seconds": end - imported, "import_seconds": imported - start}
  print(json.dumps(result))


if __name__ == "__main__":
  main()
