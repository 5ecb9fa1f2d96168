"""Formats of files of texts: how the endings of their names tell them, and what reads them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from anystep.errors import AnystepError, ExitCode, find_nearest
from anystep.tasks.sources.arrow_rows import COMPRESSIONS

if TYPE_CHECKING:
  from anystep.tasks.sources.rows_source import FilesSource

# What stands behind the ending of files of several shards, as in `a.jsonl-00000-of-00064` or `a.jsonl-*`.
_SHARD = re.compile(r"[-*?][-*?0-9of\[\]]*\Z")


class TextFormat(NamedTuple):
  """A format of files.

  Attributes:
    source: the class of `anystep.tasks.sources` that reads it.
    compressions: endings of its files that are compressed; formats without any compress by themselves.
    is_typed: whether the source guesses types, and has to be told that texts are texts.
  """

  source: str
  compressions: Sequence[str] = ()
  is_typed: bool = False


FORMATS: Mapping[str, TextFormat] = {
  "array_record": TextFormat("ArrayRecordDataSource"),
  "arrow": TextFormat("ArrowDataSource"),
  "csv": TextFormat("CsvDataSource", tuple(COMPRESSIONS), is_typed=True),
  "feather": TextFormat("ArrowDataSource"),
  "json": TextFormat("JsonLinesDataSource", tuple(COMPRESSIONS), is_typed=True),
  "jsonl": TextFormat("JsonLinesDataSource", tuple(COMPRESSIONS), is_typed=True),
  "parquet": TextFormat("ParquetDataSource"),
  "tsv": TextFormat("CsvDataSource", tuple(COMPRESSIONS), is_typed=True),
  "txt": TextFormat("TextDataSource", (".gz",)),
}
"""Formats by the ending of files."""


def find_format(pattern: str, *, option: str, **fields: object) -> str:
  """Return the format of files, a key of `FORMATS`, by the end of their name or pattern.

  Args:
    pattern: of the files.
    option: what says the format where the ending does not, for the error's fix.
    **fields: facts that stand first in the error.

  Raises:
    AnystepError: 78 `format_unknown` for an ending of none, or a compression that its source does not read.

  >>> find_format("data/a.jsonl.gz-00000-of-00064", option="file_format=")
  'jsonl'
  """
  name = _SHARD.sub("", os.path.basename(pattern))
  stem, compression = os.path.splitext(name)
  if compression not in COMPRESSIONS:
    stem, compression = name, ""
  ending = os.path.splitext(f"x.{stem}")[1].removeprefix(".")
  if ending in FORMATS and (not compression or compression in FORMATS[ending].compressions):
    return ending
  raise AnystepError(
    ExitCode.CONFIG,
    "format_unknown",
    **fields,
    path=pattern,
    expected=f"files that end in .{', .'.join(FORMATS)}; those of text compressed or not",
    got=f"{ending or 'no ending'}{compression}",
    fix=f"say which format they are in with {option}, such as {find_nearest(ending, FORMATS)}",
  )


def open_source(name: str, files: Mapping[str, Sequence[str]], column: str) -> FilesSource:
  """Return a source of the texts in files of a format.

  Args:
    name: of the format, a key of `FORMATS`.
    files: patterns by split.
    column: of the texts; of .txt files their lines get this name.
  """
  from anystep.tasks import sources

  of_files = FORMATS[name]
  kind = getattr(sources, of_files.source)
  if of_files.source == "TextDataSource":
    return kind(files, column=column)
  # A text is one, whatever its values look like.
  types = {"types": {column: "string"}} if of_files.is_typed else {}
  return kind(files, columns=[column], **types)
