"""A run's data: from caches, from files as they are, or straight from the source.

What batches are made of is the library's; this room decides which, and what of it a checkpoint keeps.
"""

from anystep.lazy import lazy_names

__all__ = ["DatasetConfig"]

__getattr__ = lazy_names(__name__, {"DatasetConfig": "config"})
