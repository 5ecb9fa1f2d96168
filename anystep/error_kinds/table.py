"""The whole table, by kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from anystep.error_kinds.cache_job import CACHE_JOB
from anystep.error_kinds.caches import CACHES
from anystep.error_kinds.exit_codes import ExitCode
from anystep.error_kinds.plans import PLANS
from anystep.error_kinds.programs import PROGRAMS
from anystep.error_kinds.tasks import TASKS
from anystep.error_kinds.training import FORWARDED, TRAINING


@dataclasses.dataclass(frozen=True, kw_only=True)
class ErrorKind:
  """An entry of the table.

  Attributes:
    code: the exit status; None where it is that of another program, which failed.
    sentence: about the failure, for people; Markdown.
    subject: a key of `SUBJECTS`.
  """

  code: ExitCode | None
  sentence: str
  subject: str


SUBJECTS: Mapping[str, str] = MappingProxyType(
  {
    "programs": "Every program",
    "caches": "Reading a cache",
    "plans": "Plans and streams",
    "tasks": "Tasks",
    "cache_job": "The cache job",
    "training": "Training runs",
  }
)
_KINDS: Mapping[str, Mapping[ExitCode, Mapping[str, str]]] = {
  "programs": PROGRAMS,
  "caches": CACHES,
  "plans": PLANS,
  "tasks": TASKS,
  "cache_job": CACHE_JOB,
  "training": TRAINING,
}


def _all_kinds() -> dict[str, ErrorKind]:
  table: dict[str, ErrorKind] = {}
  for subject, by_code in _KINDS.items():
    for code, sentences in by_code.items():
      for kind, sentence in sentences.items():
        assert kind not in table, f"{kind} has two entries"
        table[kind] = ErrorKind(code=code, sentence=sentence, subject=subject)
  for kind, sentence in FORWARDED.items():
    table[kind] = ErrorKind(code=None, sentence=sentence, subject="training")
  return table


ERROR_KINDS: Mapping[str, ErrorKind] = MappingProxyType(_all_kinds())
