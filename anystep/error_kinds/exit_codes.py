"""Exit statuses of the programs."""

import enum


class ExitCode(enum.IntEnum):
  """Exit status of a program that met a foreseen failure (docs/architecture.md#errors, after sysexits.h)."""

  USAGE = 64
  DATA = 65
  NO_INPUT = 66
  NUMERICS = 70
  CANNOT_CREATE = 73
  IO = 74
  PREEMPTED = 75
  MISMATCH = 76
  UNSAFE = 77
  CONFIG = 78
