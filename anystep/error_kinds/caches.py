"""Kinds of reading a cache: its marker, manifests, shards, tables and records."""

from anystep.error_kinds.exit_codes import ExitCode

CACHES = {
  ExitCode.DATA: {
    "completed_invalid": "`COMPLETED`, the list of a cache's manifests, is damaged.",
    "file_changed": "A file is another than the one that was written, or changes while it is read.",
    "file_foreign": "Shards of another cache stand in the cache's directory.",
    "file_missing": "A file that the manifest lists is not there.",
    "file_size": "A file has another size than the manifest says.",
    "lengths_form": "A table of token counts has another shape or dtype than the manifest says.",
    "manifest_changed": "A manifest is another than the one that `COMPLETED` names.",
    "manifest_invalid": "A manifest is damaged, or not one.",
    "manifest_task": "A manifest is another task's or split's.",
    "manifest_version": "A manifest has a version that this version of anystep does not read.",
    "offsets_form": "A table of offsets has another shape or dtype than the manifest says.",
    "offsets_invalid": "A table of offsets does not fit its shard.",
    "record_invalid": "A record is not what the manifest's features describe.",
    "shard_corrupt": "A shard's block is damaged.",
    "shard_records": "A shard has another number of records than the manifest says.",
  },
  ExitCode.NO_INPUT: {
    "cache_empty": "The cache has no examples of the split.",
    "cache_missing": "No complete cache of the task is there; the fix is the command that makes it.",
    "cache_of_seqio": "The cache is one of SeqIO's own job, which has no manifest.",
    "split_missing": "The cache, or the task, does not have the split.",
  },
  ExitCode.IO: {
    "shard_unreadable": "The disk or store failed while a shard was read: run the same command again.",
  },
}
