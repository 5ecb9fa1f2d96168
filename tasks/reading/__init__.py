"""What a SeqIO task does to examples after the cache, exactly and at any step.

With or without TensorFlow, to the same bits. What stands before the cache runs in the cache job.
"""

from anystep.lazy import lazy_names

__all__ = ["TaskReader"]

__getattr__ = lazy_names(__name__, {"TaskReader": "task_reader"})
