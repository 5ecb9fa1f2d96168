"""What a SeqIO task does to examples after the cache, exactly and at any step.

With or without TensorFlow, to the same bits. What stands before the cache runs in the cache job.
"""

from anystep.tasks.reading.task_reader import TaskReader

__all__ = ["TaskReader"]
