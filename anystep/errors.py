"""Errors that a person or a program can act on."""

from __future__ import annotations

import collections
import difflib
import functools
import json
import re
import warnings
from collections.abc import Iterable, Iterator

from anystep.error_kinds.exit_codes import ExitCode
from anystep.error_kinds.table import ERROR_KINDS

__all__ = [
  "AnystepError",
  "ExitCode",
  "exception_chain",
  "find_nearest",
  "make_file_error",
  "make_package_error",
  "one_line",
  "require",
]

_PLAIN = re.compile(r"[^\s\"'=]+\Z")
# What would end the line, move a terminal's cursor, or be no character that UTF-8 has.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# What TensorFlow puts around a failure's own words: where it was, and stacks after them.
_GRAPH = re.compile(
  r"\{\{[^}]*\}\} ?|Error in user-defined function passed to \S+ transformation with iterator: \S+: "
  r"| at component \d+|(\n\t \[\[|\n\nDetected at node| \[Op:|\nTraceback \(most recent call last\)).*",
  re.DOTALL,
)
# A value longer than this does not make the line easier to read.
_MAX_CHARACTERS = 4000


class AnystepError(Exception):
  """A foreseen failure: what kind, what was expected, what came, and how to fix it.

  A kind that is not in the table of error kinds, or has another code there, is a mistake in the program. It
  gives a warning, which tests make an error of: for a user, the failure itself matters more.

  Attributes:
    code: the exit status that a program ends with.
    kind: a stable snake_case word that names the failure, a key of `ERROR_KINDS`.
    fix: what to do about it, in one sentence.
    fields: further named facts (path, expected, got, ...), in the order they are printed.

  >>> error = AnystepError(ExitCode.DATA, "file_size", fix="restore it", path="a b", expected=2, got=1)
  >>> print(error)
  ERROR code=65 kind=file_size path="a b" expected=2 got=1 fix="restore it"
  """

  def __init__(self, code: ExitCode, kind: str, *, fix: str, **fields: object):
    super().__init__(kind)
    entry = ERROR_KINDS.get(kind)
    # An entry without a code stands for the failures of another program, with its codes.
    if entry is None or entry.code not in (code, None):
      text = f"{kind} with exit code {int(code)} is not in the table of error kinds"
      warnings.warn(text, RuntimeWarning, stacklevel=2)
    self.code = code
    self.kind = kind
    self.fix = fix
    self.fields = fields

  def __reduce__(self):
    # Errors come back from worker processes whole.
    return functools.partial(type(self), self.code, self.kind, fix=self.fix, **self.fields), ()

  def __str__(self) -> str:
    shown = "".join(f" {name}={_show(value)}" for name, value in self.fields.items())
    return f"ERROR code={int(self.code)} kind={self.kind}{shown} fix={_quote(self.fix)}"


def require(condition: bool, kind: str, *, expected: object, got: object, fix: str) -> None:
  """Raise an error of a kind, with the code that the table has for it, where a condition does not hold.

  >>> require(4 % 2 == 0, "lanes", expected="a divisor of 4", got=2, fix="give 1, 2 or 4 as lanes")

  Raises:
    AnystepError: of the kind.
  """
  if not condition:
    entry = ERROR_KINDS.get(kind)
    code = (entry and entry.code) or ExitCode.CONFIG
    raise AnystepError(code, kind, expected=expected, got=got, fix=fix)


def one_line(error: BaseException, *, with_type: bool = True, without_graph: bool = False) -> str:
  """Return an exception's type and text on one line.

  Args:
    error: the exception.
    with_type: whether its type comes first.
    without_graph: whether to leave out TensorFlow's places in graphs and stacks, which stand around the text.

  >>> one_line(ValueError("no\\n  number"))
  'ValueError: no number'
  >>> one_line(ValueError("no\\n  number"), with_type=False)
  'no number'
  >>> one_line(ValueError("{{node add}} no number [Op:Add]"), without_graph=True)
  'ValueError: no number'
  """
  text = str(error)
  name = type(error).__name__
  if without_graph:
    text = str(getattr(error, "message", None) or error)
    _, is_assertion, asserted = text.rpartition("assertion failed: ")
    if is_assertion:
      text = asserted.partition("\n")[0]
    if "in user code:" in text:
      text = text.strip().rpartition("\n")[2]
    text = _GRAPH.sub("", text).strip()
    with_type = with_type and not text.startswith(name)
  return " ".join((f"{name}: {text}" if with_type else text).split())


def exception_chain(error: BaseException) -> Iterator[BaseException]:
  """Yield an exception and those that it came from, each once, the nearest first.

  A chain may lead back to where it began: `raise` takes any exception after `from`.

  >>> error = ValueError()
  >>> error.__cause__, error.__context__ = error, KeyError()
  >>> list(exception_chain(error))
  [ValueError(), KeyError()]
  """
  pending: collections.deque[BaseException] = collections.deque([error])
  seen: set[int] = set()
  while pending:
    one = pending.popleft()
    if id(one) not in seen:
      seen.add(id(one))
      yield one
      pending.extend(other for other in (one.__cause__, one.__context__) if other is not None)


def make_file_error(kind: str, error: Exception, *, path: object, fix: str, **fields: object) -> AnystepError:
  """Return the error for a file whose content is not what it should be.

  Args:
    kind: which file it is, such as `plan_invalid`.
    error: what parsing it raised.
    path: where it lies.
    fix: what to do about it.
    fields: further facts, such as what was expected.
  """
  return AnystepError(ExitCode.DATA, kind, path=path, **fields, got=one_line(error), fix=fix)


def make_package_error(error: ModuleNotFoundError, *, expected: str, package: str) -> AnystepError:
  """Return the error where a package that only some need could not be imported.

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
  return text if _PLAIN.match(text) and not _UNSAFE.search(text) else _quote(text)


def _quote(text: str) -> str:
  """Return the text as JSON, in one line and of characters that terminals show."""
  quoted = json.dumps(text, ensure_ascii=False)
  return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)


def find_nearest(name: str, names: Iterable[str], *, limit: int = 3) -> str:
  """Return the known names closest to a mistyped one, joined by commas, for an error's text.

  >>> find_nearest("stdlib_ml", ["stdlib_lm", "c4", "stdlib_span_corruption"])
  'stdlib_lm'
  """
  sorted_names = sorted(names)
  return ", ".join(difflib.get_close_matches(name, sorted_names, n=limit, cutoff=0.5) or sorted_names[:limit])
