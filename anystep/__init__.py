"""anystep: the batch of step t is a pure function of t.

The library: what the writer of a cache and its readers agree on. It needs numpy, protobuf, etils,
array_record, zstandard and google-crc32c, and is fast where numba is.
"""

import importlib as _importlib
from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from anystep import earlier_names as _earlier_names
from anystep.caches.cache import Cache, open_cache
from anystep.caches.read_pool import ReadPool
from anystep.errors import AnystepError, ExitCode
from anystep.errors import make_package_error as _make_package_error
from anystep.features.converters import (
  DecoderConverter,
  EncoderConverter,
  EncoderDecoderConverter,
  FeatureConverter,
  LMConverter,
  MaxTextConverter,
  PassThroughConverter,
  PrefixLMConverter,
)
from anystep.features.digest import batch_digest, row_digests
from anystep.order.epochs import EpochPolicy
from anystep.order.mixing import Mixing
from anystep.order.packing import PackingPolicy
from anystep.order.permutation import Permutation
from anystep.plans.plan import Plan
from anystep.plans.tombstones import TombstoneList
from anystep.stores.disk_cache import DiskCache
from anystep.stores.range_fetcher import FetchBudget
from anystep.stores.store_path import register_store_paths as _register_store_paths
from anystep.streams.stream import Stream, open_stream
from anystep.transforms.functions import Filter, Map, MapBatch, RandomMap
from anystep.transforms.transform import Records, Transform

if _TYPE_CHECKING:
  from anystep.tasks.seqio_api.deterministic_task import DeterministicMixture, DeterministicTask

__all__ = [
  "AnystepError",
  "Cache",
  "DecoderConverter",
  "DeterministicMixture",
  "DeterministicTask",
  "DiskCache",
  "EncoderConverter",
  "EncoderDecoderConverter",
  "EpochPolicy",
  "ExitCode",
  "FeatureConverter",
  "FetchBudget",
  "Filter",
  "LMConverter",
  "Map",
  "MapBatch",
  "MaxTextConverter",
  "Mixing",
  "PackingPolicy",
  "PassThroughConverter",
  "Permutation",
  "Plan",
  "PrefixLMConverter",
  "RandomMap",
  "ReadPool",
  "Records",
  "Stream",
  "TombstoneList",
  "Transform",
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


_earlier_names.make_importable()
_register_store_paths()


def __getattr__(name: str) -> _Any:
  # Subclasses of SeqIO's: the library works without it, and imports it for nobody who does not ask for them.
  if name not in ("DeterministicMixture", "DeterministicTask"):
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  try:
    module = _importlib.import_module("anystep.tasks.seqio_api.deterministic_task")
  except ModuleNotFoundError as error:
    if error.name not in ("seqio", "tensorflow"):
      raise
    raise _make_package_error(
      error, expected=f"SeqIO, for anystep.{name}", package="'anystep[cache]'"
    ) from error
  return getattr(module, name)


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
