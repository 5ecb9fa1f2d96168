"""The trainer: from a cache to batches, a model, checkpoints and metrics."""

from anystep.lazy import lazy_names

__all__ = ["LoadedModel", "load_model"]

__getattr__ = lazy_names(__name__, {"LoadedModel": "loading", "load_model": "loading"})
