"""A run's data: from caches, from files as they are, or straight from the source.

This room decides which data a run takes and what a checkpoint keeps of it. The library makes the batches.
"""

from anystep.lazy import lazy_names

__all__ = ["Dataset", "DatasetConfig", "PlannedDataset"]

__getattr__ = lazy_names(
  __name__, {"Dataset": "cached", "DatasetConfig": "config", "PlannedDataset": "cached"}
)
