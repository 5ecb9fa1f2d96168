"""What is learned: SeqIO tasks and mixtures, their sources, preprocessors, vocabularies and metrics.

Tasks stand in modules of their own, which register them when they are imported (`--module_import`).
"""

from __future__ import annotations

from typing import Any

__all__ = ["text_task"]


def __getattr__(name: str) -> Any:
  # Whoever asks for a task needs SeqIO and TensorFlow; who imports this package may not.
  if name == "text_task":
    from anystep.tasks.text_tasks import text_task

    return text_task
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
