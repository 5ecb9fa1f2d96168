"""Sources for SeqIO tasks that SeqIO has none of, and which files can be trained from as they are.

A new format is a file here and a row in `text_tasks`. What is done to examples is not a source's affair.
"""

from anystep.tasks.sources.array_record_source import ArrayRecordDataSource
from anystep.tasks.sources.file_sources import (
  ArrowDataSource,
  CsvDataSource,
  JsonLinesDataSource,
  ParquetDataSource,
  TextDataSource,
)
from anystep.tasks.sources.held_out_source import HeldOutDataSource
from anystep.tasks.sources.huggingface_source import HuggingFaceDataSource

__all__ = [
  "ArrayRecordDataSource",
  "ArrowDataSource",
  "CsvDataSource",
  "HeldOutDataSource",
  "HuggingFaceDataSource",
  "JsonLinesDataSource",
  "ParquetDataSource",
  "TextDataSource",
]
