"""anystep: the batch of step t is a pure function of t.

The library: what the writer of a cache and its readers agree on. It needs numpy, protobuf, etils,
array_record and google-crc32c.
"""

from pathlib import Path as _Path

from anystep.cache import Cache, open_cache
from anystep.converters import EncoderDecoderConverter, FeatureConverter, PassThroughConverter
from anystep.digest import batch_digest, row_digests
from anystep.epochs import EpochPolicy
from anystep.errors import AnystepError, ExitCode
from anystep.mixing import Mixing
from anystep.permutation import Permutation
from anystep.plan import Plan
from anystep.read_pool import ReadPool
from anystep.stream import Stream, open_stream

__all__ = [
  "AnystepError",
  "Cache",
  "EncoderDecoderConverter",
  "EpochPolicy",
  "ExitCode",
  "FeatureConverter",
  "Mixing",
  "PassThroughConverter",
  "Permutation",
  "Plan",
  "ReadPool",
  "Stream",
  "batch_digest",
  "open_cache",
  "open_stream",
  "row_digests",
]

# In a checkout tasks/, cache_job/, train/ and gin_configs/ stand beside anystep/; setup.py makes one
# package of them. A program started in the checkout finds this file first (Python puts the current
# directory on the path), so it must find the others as installed programs do.
_checkout = _Path(__file__).resolve().parents[1]
if not (_Path(__file__).parent / "tasks").is_dir() and (_checkout / "setup.py").is_file():
  __path__.append(str(_checkout))
