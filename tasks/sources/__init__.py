"""Sources for SeqIO tasks that SeqIO has none of, and which files can be trained from as they are.

A new format is a file here and a row in `text_formats`. What is done to examples is not a source's affair.
"""

from anystep.lazy import lazy_names

__all__ = [
  "ArrayRecordDataSource",
  "ArrowDataSource",
  "CsvDataSource",
  "HeldOutDataSource",
  "HuggingFaceDataSource",
  "JsonLinesDataSource",
  "ParquetDataSource",
  "TextDataSource",
  "files_as_is",
  "files_of",
  "random_access",
]

__getattr__ = lazy_names(
  __name__,
  {
    "ArrayRecordDataSource": "array_record_source",
    "ArrowDataSource": "file_sources",
    "CsvDataSource": "file_sources",
    "HeldOutDataSource": "held_out_source",
    "HuggingFaceDataSource": "huggingface_source",
    "JsonLinesDataSource": "file_sources",
    "ParquetDataSource": "file_sources",
    "TextDataSource": "file_sources",
    "files_as_is": "in_place",
    "files_of": "in_place",
    "random_access": "in_place",
  },
)
