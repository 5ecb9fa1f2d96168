"""Checkpoints: whole or not at all, and never taken for what they are not.

Arrays by Orbax; what makes a directory a checkpoint is ours.
"""

from anystep.train.checkpoints.checkpoints import CheckpointConfig

__all__ = ["CheckpointConfig"]
