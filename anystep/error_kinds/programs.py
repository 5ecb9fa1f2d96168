"""Kinds that every program and the library share: arguments, files, the system, packages."""

from anystep.error_kinds.exit_codes import ExitCode

PROGRAMS = {
  ExitCode.USAGE: {
    "arguments": "The command line lacks an argument, or has one that the program does not take.",
    "flags": "A flag is unknown, or its value cannot be read.",
    "index": "The cache has no example of this index.",
    "path_invalid": "The file system cannot have such a path: it is too long, or its links lead in a circle.",
    "place": "The source shard has no example at this place.",
    "row": "No batch has a row of this number.",
    "skip": "So many steps or examples cannot be skipped: the number is outside the range that is named.",
    "source": "The split has no source shard of this name or number.",
    "split_unknown": "No selected task has a split of this name; near names are printed.",
    "task_unknown": "No task or mixture of this name is known; near names are printed.",
  },
  ExitCode.NO_INPUT: {
    "file_unreadable": "The user that runs the program may not read a file or directory.",
    "input_missing": "A file or directory is not there.",
  },
  ExitCode.CANNOT_CREATE: {
    "cannot_create": "A file or directory cannot be written, or one stands in the other's place.",
    "lock_invalid": "Something that is not a regular file stands where a lock belongs.",
    "output_directory": "The directory of the output file does not exist.",
    "output_exists": "The output file exists already; `--overwrite` replaces a file.",
  },
  ExitCode.IO: {
    "disk_full": "The disk or quota is full: make room, and run the same command again.",
    "io_failed": "The disk or store failed: see to it, and run the same command again.",
    "too_many_files": "The process may not have more files open (`ulimit -n`).",
  },
  ExitCode.UNSAFE: {
    "file_name": "The name of a file could lead out of the root of the caches.",
    "split_name": "The name of a split could lead out of the task's directory.",
    "task_name": "The name of a task could lead out of the root of the caches.",
    "vocabulary_name": "The name of a vocabulary's copy is not a sha256.",
  },
  ExitCode.CONFIG: {
    "forked_process": "A library's open files or threads do not survive the fork that made this process.",
    "module_import": "A module that registers tasks cannot be imported, here or on a worker.",
    "out_of_memory": "The program needs more memory than it may have.",
    "package_missing": "A package that this needs is not installed; the fix is the command that installs it.",
    "store_setting": "An environment variable for reading from stores is not a whole number from 1 on.",
    "store_unsupported": "The path is on a store that cannot be used here; the fix says what to do.",
  },
}
