"""SeqIO tasks and mixtures: registry, sources, preprocessors, vocabularies and metrics.

Tasks stand in modules of their own, which register them when they are imported (`--module_import`).
"""

from anystep.lazy import lazy_names
from anystep.tasks.startup import silence_tensorflow_import

__all__ = ["text_task"]

# Whoever asks for a task needs SeqIO and TensorFlow; who imports this package may not.
__getattr__ = lazy_names(__name__, {"text_task": "text_tasks"})

# Worker processes import this package before TensorFlow, whatever has started them.
silence_tensorflow_import()
