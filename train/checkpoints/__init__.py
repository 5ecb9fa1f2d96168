"""Checkpoints: written whole or not at all, and checked before they are used.

Orbax writes the arrays. The marker, the hashes and the checks are written here.
"""

from anystep.lazy import lazy_names

__all__ = ["CheckpointConfig", "RestoreConfig"]

__getattr__ = lazy_names(__name__, {"CheckpointConfig": "checkpoints", "RestoreConfig": "restore_config"})
