"""Measurements in processes of their own, for their peak memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
from collections.abc import Callable
from typing import Any


def run_alone(measure: Callable[..., dict[str, Any]], *arguments: object) -> dict[str, Any]:
  """Return what a function measures in a process of its own, and as `peak_bytes` that process's memory."""
  context = multiprocessing.get_context("spawn")
  receiver, sender = context.Pipe(duplex=False)
  process = context.Process(target=_send, args=(sender, measure, arguments))
  process.start()
  sender.close()
  with contextlib.closing(receiver):
    measured = receiver.recv()
  process.join()
  return measured


def _send(sender: Any, measure: Callable[..., dict[str, Any]], arguments: tuple[object, ...]) -> None:
  measured = measure(*arguments)
  sender.send({**measured, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10})
