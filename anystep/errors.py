"""Errors that a person or a program can act on."""

from __future__ import annotations

import difflib
import enum
import functools
import json
import re
from collections.abc import Iterable

_PLAIN = re.compile(r"[^\s\"'=]+\Z")
# What would end the line, move a terminal's cursor, or be no character that UTF-8 has.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# A value longer than this does not make the line easier to read.
_MAX_CHARACTERS = 4000


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


class AnystepError(Exception):
  """A foreseen failure: what kind, what was expected, what came, and how to fix it.

  Attributes:
    code: the exit status that a program ends with.
    kind: a stable snake_case word that names the failure.
    fix: what to do about it, in one sentence.
    fields: further named facts (path, expected, got, ...), in the order they are printed.

  >>> error = AnystepError(ExitCode.DATA, "shard_size", fix="make it anew", path="a b", expected=2, got=1)
  >>> print(error)
  ERROR code=65 kind=shard_size path="a b" expected=2 got=1 fix="make it anew"
  """

  def __init__(self, code: ExitCode, kind: str, *, fix: str, **fields: object):
    super().__init__(kind)
    self.code = code
    self.kind = kind
    self.fix = fix
    self.fields = fields

  def __reduce__(self):
    # Errors come back from worker processes whole.
    return functools.partial(type(self), self.code, self.kind, fix=self.fix, **self.fields), ()

  def __str__(self) -> str:
    shown = "".join(f" {name}={_show(value)}" for name, value in self.fields.items())
    return f"ERROR code={int(self.code)} kind={self.kind}{shown} fix={_quoted(self.fix)}"


def one_line(error: BaseException) -> str:
  """An exception's type and text, without line breaks.

  >>> one_line(ValueError("no\\n  number"))
  'ValueError: no number'
  """
  return " ".join(f"{type(error).__name__}: {error}".split())


def invalid_file(kind: str, error: Exception, *, path: object, fix: str, **fields: object) -> AnystepError:
  """The error for a file whose content is not what it should be.

  Args:
    kind: which file it is, such as `plan_invalid`.
    error: what parsing it raised.
    path: where it lies.
    fix: what to do about it.
    fields: further facts, such as what was expected.
  """
  return AnystepError(ExitCode.DATA, kind, path=path, **fields, got=one_line(error), fix=fix)


def package_missing(error: ModuleNotFoundError, *, expected: str, package: str) -> AnystepError:
  """The error where a package that only some need could not be imported.

  Args:
    error: what the import raised.
    expected: the package, and what for.
    package: what pip calls it.
  """
  fix = f"pip install {package}"
  return AnystepError(ExitCode.CONFIG, "package_missing", expected=expected, got=str(error), fix=fix)


def _show(value: object) -> str:
  text = value if isinstance(value, str) else str(value)
  if len(text) > _MAX_CHARACTERS:
    text = f"{text[:_MAX_CHARACTERS]}… ({len(text):,} characters)"
  return text if _PLAIN.match(text) and not _UNSAFE.search(text) else _quoted(text)


def _quoted(text: str) -> str:
  """The text as JSON, in one line and of characters that terminals show."""
  quoted = json.dumps(text, ensure_ascii=False)
  return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)


def nearest(name: str, names: Iterable[str], *, limit: int = 3) -> str:
  """The known names closest to a mistyped one, joined by commas, for an error's text.

  >>> nearest("stdlib_ml", ["stdlib_lm", "c4", "stdlib_span_corruption"])
  'stdlib_lm'
  """
  known = sorted(names)
  return ", ".join(difflib.get_close_matches(name, known, n=limit, cutoff=0.5) or known[:limit])
