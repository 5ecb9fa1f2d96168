"""What an attack must see: tries that end in every way, for the tests of the counting itself."""

from __future__ import annotations

import os
import pathlib
import signal
import time

from attacks.attack import HARMLESS, Attempt, Chance, Wrong

from anystep.errors import AnystepError, ExitCode


def prepare(folder: pathlib.Path) -> Attempt:
  """Returns the attempt."""

  def attempt(chance: Chance) -> str:
    chance.note(f"number {chance.number}")
    match chance.number:
      case 1:
        raise AnystepError(ExitCode.DATA, "file_changed", fix="restore it")
      case 2:
        raise AnystepError(ExitCode.DATA, "file_changed", fix="")
      case 3:
        raise Wrong("another batch")
      case 4:
        raise IndexError("pop from an empty deque")
      case 5:
        raise KeyboardInterrupt
      case 6:
        time.sleep(60)
      case 7:
        os.kill(os.getpid(), signal.SIGBUS)
      case 8:
        # Nothing that Python could interrupt.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        time.sleep(60)
      case 9:
        bytearray(1 << 40)
    return HARMLESS

  return attempt
