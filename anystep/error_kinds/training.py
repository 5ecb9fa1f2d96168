"""Kinds of training runs: configuration, checkpoints, what a run resumes, the demo."""

from anystep.error_kinds.exit_codes import ExitCode

TRAINING = {
  ExitCode.USAGE: {
    "accept_change": "`--accept_change` names a value that decides neither parameters nor losses.",
  },
  ExitCode.DATA: {
    "accepted_change_invalid": "A file of `accepted_changes/` is damaged.",
    "checkpoint_corrupt": "The arrays of a checkpoint cannot be read.",
    "checkpoint_file": "A file of a checkpoint is missing, or another than the one that was written.",
    "checkpoint_integrity": "The list of a checkpoint's files is damaged.",
    "checkpoint_step": "A checkpoint holds the state of another step than its directory names.",
    "checkpoints_unreadable": "No checkpoint is whole, and training does not start anew: restore one.",
    "configuration_invalid": "The configuration that the run keeps is damaged.",
    "data_uncached_invalid": "`data_uncached.json`, how a run reads its source, is damaged.",
    "metrics_invalid": "The file of a run's metrics is damaged.",
    "run_invalid": "`run.json`, the run's identity, is damaged.",
    "step_log_invalid": "The log of steps is damaged.",
  },
  ExitCode.NO_INPUT: {
    "checkpoint_missing": "There is no checkpoint of a known format at the path, or none of the step.",
    "run_incomplete": "A run of the demo has no step log or no checkpoint.",
  },
  ExitCode.NUMERICS: {
    "loss_not_finite": "The loss is infinite or not a number.",
  },
  ExitCode.CANNOT_CREATE: {
    "checkpoint_foreign": "Another program's files stand where a checkpoint belongs.",
    "conversion_running": "Another conversion writes the same target: it says which process, since when.",
    "output_dir": "The demo's directory holds something else than an earlier demo.",
    "run_active": "Another process trains there: it says which, on which host, since when.",
  },
  ExitCode.IO: {
    "checkpoint_write": "A checkpoint could not be written: the run goes on from the newest whole one.",
  },
  ExitCode.PREEMPTED: {
    "preempted": "SIGTERM ended the run after a committed checkpoint: run the same command again.",
  },
  ExitCode.MISMATCH: {
    "checkpoint_converted": "A run starts from a checkpoint of `anystep-convert`, and resumes only its own.",
    "checkpoint_run": "The checkpoint is another run's: move it, or `--accept_change=checkpoint_50/run`.",
    "checkpoint_settings": "The network has other settings, such as `rope_theta`, than the checkpoint's.",
    "checkpoint_tree": "A leaf has another shape than in the checkpoint, or only one side has it.",
    "resume_contract": "Values are not those of the checkpoint: set them back, or accept each by name.",
  },
  ExitCode.CONFIG: {
    "assignment": "A rule for the leaves of a checkpoint matches nothing, or names a leaf that is not there.",
    "attention_implementation": "cuDNN would give the learned position biases no gradient.",
    "cache_dir": "Training from caches needs `CACHE_DIR`, the root that `anystep-cache` wrote to.",
    "cache_too_large": "`--cache_if_missing` would write more than its limit.",
    "checkpoint_unsupported": "A model has parts or settings that the other format's models do not have.",
    "factor_rule": "Adafactor has no rule for the axes of a parameter of more than two.",
    "gin_binding": "A value of `--gin.NAME=` cannot be read.",
    "gin_file": "A gin file is not there, or cannot be read.",
    "gin_required": "A value that the gin file requires is not set.",
    "gin_unknown_macro": "A name stands in `--gin.NAME=`, or in a gin file, that nothing defines or uses.",
    "gin_value": "The program cannot be built of a value of the gin file.",
    "learning_rate": "A learning rate schedule cannot be built of these factors or numbers of steps.",
    "logical_axis": "A parameter has a logical axis that no rule of the partitioner names, or one twice.",
    "logical_axis_rules": "The rules of the partitioner are no pairs of a logical and a mesh axis.",
    "mesh_shape": "The devices cannot be a mesh of these shapes.",
    "mixture": "An evaluation set is one task of the mixture.",
    "model_dir": "T5X's data needs `model_dir` to go on from the newest checkpoint.",
    "module": "A module or model of one's own takes, returns or names something else than a run needs.",
    "module_missing": "`--cache_if_missing` needs the module that registers the task.",
    "num_microbatches": "The microbatches do not divide the batch, or the model cannot be trained in parts.",
    "num_partitions": "The partitions do not divide the devices, or the sizes of an array.",
    "optimizer": "An optimizer cannot be built of these arguments.",
    "parameter_average": "The optimizer keeps no average of the parameters, or of some of them alone.",
    "parameter_pattern": "A regular expression over parameter paths is invalid, or matches none or not all.",
    "process_count": "Several processes cannot train one run together yet.",
    "rows_per_key": "The rows that share a key of dropout do not divide those that are computed at once.",
    "source_refused": "The task or its source cannot be used straight from the source.",
    "total_steps": "The checkpoint is later than the last step.",
    "use_cached": "The option needs `USE_CACHED_TASKS = True`, or `False`.",
    "restore_mode": "A run starts from one checkpoint, and the path holds several.",
    "vocab_size": "The network's `vocab_size` is smaller than the task's vocabulary.",
    "vocabulary": "`VOCABULARY` is not the task's.",
  },
}
# These end with the exit status of the program that they started, where it has one of the codes.
FORWARDED = {
  "cache_program": "`anystep-cache`, which the run started, failed; its own error stands above.",
  "demo_step_failed": "A program that the demo started failed; its own error stands above.",
}
