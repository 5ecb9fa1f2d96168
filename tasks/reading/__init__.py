"""A SeqIO task's preprocessors after the cache, run exactly and at any step.

They give the same bits with and without TensorFlow. Preprocessors before the cache run in the cache job.
"""

from anystep.lazy import lazy_names

__all__ = ["TaskReader"]

__getattr__ = lazy_names(__name__, {"TaskReader": "task_reader"})
