"""Checkpoints: whole or not at all, and never taken for what they are not.

Arrays by Orbax; what makes a directory a checkpoint is ours.
"""

from anystep.lazy import lazy_names

__all__ = ["CheckpointConfig"]

__getattr__ = lazy_names(__name__, {"CheckpointConfig": "checkpoints"})
