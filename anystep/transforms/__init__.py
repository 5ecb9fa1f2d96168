"""Transforms of examples at reading, and the identities by which plans know them.

These are functions of examples. The transforms of SeqIO tasks are in `anystep.tasks.reading`.
"""

from anystep.lazy import lazy_names

__all__ = ["Chain", "Records", "Transform", "random_keys"]

__getattr__ = lazy_names(
  __name__,
  {"Chain": "transform", "Records": "transform", "Transform": "transform", "random_keys": "transform"},
)
