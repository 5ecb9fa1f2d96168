"""Kinds of the cache job, `anystep-cache`."""

from anystep.error_kinds.exit_codes import ExitCode

CACHE_JOB = {
  ExitCode.USAGE: {
    "flags_exclusive": "Two flags contradict each other.",
    "option_limit": "The value of a flag is outside its range.",
    "pipeline_options": "Beam does not know the options, or they do not go together.",
    "task_feature_lengths": "Feature lengths are missing that a preprocessor takes, or they are not JSON.",
  },
  ExitCode.DATA: {
    "bad_examples": "All source shards together have more bad examples than `--max_bad_examples`.",
    "feature_form_varies": "An example or a source shard has other features, dtypes or ranks than the first.",
    "float64_inexact": "An example has a float64 that float32, which records hold, is not equal to.",
    "integer_too_large": "An example has a uint64 that int64, which records hold, is too small for.",
    "job_state_invalid": "What an earlier run of the job left is damaged: start anew with `--noresume`.",
    "preprocessor_failed": "A preprocessor raised; the source shard, the place and the cause are printed.",
    "preprocessors_differ": "`--determinism_check`: a second time, an example came out otherwise.",
    "record_too_large": "An example is larger than 64 MiB.",
    "seqio_cache_incomplete": "SeqIO's cache is damaged or incomplete.",
    "spill_corrupt": "A temporary file of the job is damaged: start anew with `--noresume`.",
    "text_not_utf8": "An example has a text that is not UTF-8.",
  },
  ExitCode.NO_INPUT: {
    "seqio_cache_missing": "`--from_seqio_cache` names no complete cache by SeqIO.",
    "split_empty": "No example is left of a split.",
  },
  ExitCode.CANNOT_CREATE: {
    "job_running": "Another job caches the task: its host, process and start are printed.",
  },
  ExitCode.IO: {
    "job_incomplete": "Workers did not leave what they had to: run the same command again.",
    "runner_unreachable": "Beam's runner does not answer.",
    "worker_failed": "A worker failed, for lack of memory perhaps: what was finished is kept.",
  },
  ExitCode.MISMATCH: {
    "cache_options": "A complete cache was made with other options: `--overwrite`, or another directory.",
    "provenance_changed": "What an unfinished job left is of another source or other versions: `--noresume`.",
  },
  ExitCode.UNSAFE: {
    "source_in_cache": "The source's files stand where the cache would write its own.",
  },
  ExitCode.CONFIG: {
    "file_outside_root": "`--index_only`: a file is outside the root, on a store, which has no links.",
    "output_feature": "The examples are not what the task's `output_features` say.",
    "placeholder_missing": "The task has no placeholder: `--cache_at=end`, or leave the task out.",
    "preprocessor_before_cache": "`--index_only`: a preprocessor stands before the placeholder.",
    "preprocessors_refused": "SeqIO refuses to run the preprocessors before the cache.",
    "runner_missing": "The packages of Beam's runner are not installed.",
    "source_decodes": "`--index_only`: the source makes something else of records than they are.",
    "source_not_files": "`--index_only`: the source is not made of files.",
  },
}
