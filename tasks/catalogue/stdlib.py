"""Tasks on the Python files of the running interpreter's standard library: real text on any machine.

Importing this module registers `stdlib_span_corruption` (encoder-decoder) and `stdlib_lm` (decoder only).
About 32 MB, 40,000 examples where the library comes with its tests; licence: PSF.
"""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from pathlib import Path

import seqio
import tensorflow as tf

from anystep.tasks import metrics, preprocessors

PIECE_BYTES = 800
NUM_SOURCE_SHARDS = 16
# 259 byte and special ids, then sentinels up to a multiple of 128.
VOCABULARY = seqio.ByteVocabulary(extra_ids=125)

_SPLITS = ("train", "validation")
_VALIDATION_SHARE = 64
_SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "__pycache__"})


class PythonFilesSource(seqio.DataSource):
  """The `*.py` files below a directory, one example a file: its path in it and its text.

  A file is in `validation` where a hash of its path says so (one in 64), else in `train`. Shard k of n
  has every n-th file of the split, in the order of their paths, from the k-th on.

  Args:
    directory: where the files are; the standard library's by default.
  """

  def __init__(self, directory: str | None = None):
    super().__init__(splits=_SPLITS)
    self._directory = Path(directory or sysconfig.get_paths()["stdlib"])

  @property
  def supports_arbitrary_sharding(self) -> bool:
    """Files can be dealt to any number of shards, but the shards of a cache are always those listed."""
    return False

  def list_shards(self, split: str) -> list[str]:
    """Names of the shards: the same on every machine."""
    return [f"{split}-{k:05d}-of-{NUM_SOURCE_SHARDS:05d}" for k in range(NUM_SOURCE_SHARDS)]

  def num_input_examples(self, split: str) -> int:
    """Number of the split's files."""
    return len(self._files()[split])

  def get_dataset(
    self, split="train", shuffle=False, seed=None, shard_info=None, **unused
  ) -> tf.data.Dataset:
    """`{"name", "text"}` of each file; see `seqio.DataSource.get_dataset`."""
    del unused
    files = self._files()[split]
    if shard_info is not None:
      files = files[shard_info.index :: shard_info.num_shards]
    paths = tf.data.Dataset.from_tensor_slices(tf.constant(files, tf.string, shape=[len(files)]))
    if shuffle:
      paths = paths.shuffle(max(len(files), 1), seed=seed)

    def read(name: tf.Tensor) -> dict[str, tf.Tensor]:
      return {"name": name, "text": tf.io.read_file(tf.strings.join([str(self._directory), name], "/"))}

    return paths.map(read, num_parallel_calls=tf.data.AUTOTUNE)

  @functools.cache  # noqa: B019 - sources live as long as the registry
  def _files(self) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {split: [] for split in _SPLITS}
    paths = (path.relative_to(self._directory) for path in self._directory.rglob("*.py"))
    for name in sorted(path.as_posix() for path in paths if not _SKIPPED_DIRECTORIES & set(path.parts)):
      digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
      held_out = int.from_bytes(digest, "little") % _VALIDATION_SHARE == 0
      files["validation" if held_out else "train"].append(name)
    return files


_CACHED = (
  functools.partial(preprocessors.cut_into_pieces, piece_bytes=PIECE_BYTES),
  functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
  seqio.CacheDatasetPlaceholder(),
)

seqio.TaskRegistry.add(
  "stdlib_span_corruption",
  source=PythonFilesSource(),
  preprocessors=[*_CACHED, preprocessors.span_corruption, seqio.preprocessors.append_eos],
  output_features={
    "inputs": seqio.Feature(VOCABULARY, add_eos=True),
    "targets": seqio.Feature(VOCABULARY, add_eos=True),
  },
  metric_fns=[metrics.edit_similarity, metrics.log_likelihood],
)

seqio.TaskRegistry.add(
  "stdlib_lm",
  source=PythonFilesSource(),
  preprocessors=[*_CACHED, preprocessors.random_chunk],
  output_features={"targets": seqio.Feature(VOCABULARY, add_eos=False)},
  metric_fns=[metrics.bits_per_byte, metrics.log_likelihood],
)
