"""A run's data: from caches, from files as they are, or straight from the source.

What batches are made of is the library's; this room decides which, and what of it a checkpoint keeps.
"""

from anystep.train.datasets.config import DatasetConfig

__all__ = ["DatasetConfig"]
