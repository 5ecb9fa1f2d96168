"""What is wrong on the command line or in gin ends with status and fix, before any device is touched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from anystep.errors import AnystepError
from anystep.train import main
from anystep.train.runs.trainer import PreparedRun

_GIN_HEAD = "from __gin__ import dynamic_registration\nfrom anystep.train.runs import trainer\n"


@pytest.mark.parametrize(
  ("arguments", "code", "kind", "said"),
  [
    (["--gin_file=TMP/typo.gin"], 78, "gin_file", "totl_steps"),
    (["--gin_file=TMP/unknown.gin"], 78, "gin_file", "Trayner"),
    (["--gin_file=nowhere.gin"], 78, "gin_file", "nowhere.gin"),
    (["--gin_file=TMP/macro.gin"], 78, "gin_unknown_macro", "nearest=BATCH_SIZE"),
    (["--gin.BATCH_SIZE=16.0"], 78, "gin_value", "batch_size=16.0"),
    (["--gin.RANDOM_SEED=None"], 78, "gin_value", "None"),
    (["--gin.MODEL_DIR=None"], 78, "gin_value", "model_dir"),
    (["--gin.TRAIN_STEPS=20.5"], 78, "gin_value", "20.5"),
    (["--gin.partitioning.Partitioner.num_partitions=0"], 78, "gin_value", "num_partitions"),
    (["--gin.datasets.DatasetConfig.prefetch_batches=-1"], 78, "gin_value", "prefetch_batches=-1"),
    (["--gin.BATCHSIZE=3"], 78, "gin_unknown_macro", "BATCH_SIZE"),
    (["--gin.BATCH_SIZE=8 8"], 78, "gin_binding", "BATCH_SIZE=8 8"),
    (["--gin.MODEL_DIR=%gin.REQUIRED"], 78, "gin_required", "MODEL_DIR"),
    (["--gin.CHECKPOINT_PERIOD=0"], 78, "gin_value", "period_steps"),
    (["--gin.TRAIN_STEPS=0"], 78, "gin_value", "total_steps"),
    (["--gin.OPTIMIZER=None"], 78, "gin_value", "optimizer_def"),
    (["--gin.network.T5Config.emb_dim='wide'"], 78, "gin_value", "emb_dim"),
    (["--gin.MIXTURE_OR_TASK_NAME='tiny_span_coruption'"], 64, "task_unknown", "tiny_span_corruption"),
    (["--gin.MIXTURE_OR_TASK_MODULE='no_such_module'"], 78, "module_import", "no_such_module"),
    (["--gin.train/datasets.DatasetConfig.split='test'"], 66, "split_missing", "train, validation"),
    (["--gin.BATCH_SIZE=0"], 78, "batch_size", "at least 1"),
    (["--gin.datasets.DatasetConfig.epoch_policy='never'"], 78, "epoch_policy", "reshuffle"),
    (
      ["--gin.seqio.ByteVocabulary.extra_ids=100"],
      78,
      "vocabulary",
      "extra_ids: 125 → 100; size: 384 → 359",
    ),
    (["--gin.network.T5Config.vocab_size=300"], 78, "vocab_size", "384"),
    (["--gin.TASK_FEATURE_LENGTHS={'inputs': 4000, 'targets': 1000}"], 78, "sentinels", "extra_ids=125"),
    (["--gin.TASK_FEATURE_LENGTHS={'inputs': 24}"], 78, "feature_length", "targets"),
    (["--gin.partitioning.Partitioner.num_partitions=3"], 78, "num_partitions", "8 devices"),
    (["--gin_file=TMP/fifo.gin"], 78, "gin_file", "a FIFO, not a regular file"),
    (["--gin_file=TMP/deep.gin"], 78, "gin_file", "deep.gin"),
    (["--gin_file=TMP/itself.gin"], 78, "gin_file", "itself.gin"),
    (["--gin.TASK_FEATURE_LENGTHS=" + "[" * 10_000 + "]" * 10_000], 78, "gin_binding", "TASK_FEATURE"),
    (["--gin.TASK_FEATURE_LENGTHS={'inputs': 10000000000, 'targets': 8}"], 78, "gin_value", "limits"),
    (["--gin.BATCH_SIZE=1000000000000"], 78, "gin_value", "batch_size=1000000000000"),
    (["--gin.CACHE_DIR='a\\0b'"], 78, "gin_value", "control characters"),
    (["--gin.DATA_PLAN='a\\nb'"], 78, "gin_value", "control characters"),
    (["--gin.DATA_PLAN='TMP/fifo.gin'"], 65, "plan_invalid", "a FIFO, not a regular file"),
    (["--gin.DATA_PLAN='TMP/deep.gin'"], 65, "plan_invalid", "deep.gin"),
    (["--gin.MIXTURE_OR_TASK_NAME='TMP/fifo.json'"], 78, "mixture_invalid", "a FIFO, not a regular file"),
    (["--gin.MIXTURE_OR_TASK_NAME='a\\0b'"], 64, "task_unknown", "a\\"),
    (["--gin.MODEL_DIR='a\\0b'"], 78, "gin_value", "control characters"),
    (["--gin_bindings=BATCH_SIZE=3"], 64, "flags", "write each binding as --gin.NAME=value"),
    (["--dryrun"], 64, "flags", "dry_run"),
    (["model"], 64, "flags", "model"),
    (["--gin.BATCH_SIZE"], 64, "flags", "--gin.BATCH_SIZE"),
  ],
)
def test_what_is_wrong_is_named_with_its_status(arguments, code, kind, said, command, tmp_path):
  (tmp_path / "typo.gin").write_text(_GIN_HEAD + "trainer.Trainer.totl_steps = 3\n")
  (tmp_path / "macro.gin").write_text("BATCH_SZIE = 64\n")
  (tmp_path / "deep.gin").write_text("BATCH_SIZE = " + "[" * 100_000 + "]" * 100_000)
  (tmp_path / "itself.gin").write_text(f"include '{tmp_path}/itself.gin'\n")
  for name in ("fifo.gin", "fifo.json"):
    os.mkfifo(tmp_path / name)
  (tmp_path / "unknown.gin").write_text(_GIN_HEAD + "trainer.Trayner.total_steps = 3\n")
  arguments = [argument.replace("TMP", str(tmp_path)) for argument in arguments]
  with pytest.raises(AnystepError) as refused:
    main.main([*command(), *arguments])
  assert (refused.value.code, refused.value.kind) == (code, kind)
  assert said in str(refused.value)
  assert not (tmp_path / "model" / "step_log").exists()


def test_a_missing_cache_prints_the_command_that_makes_it(command, tmp_path):
  with pytest.raises(AnystepError) as refused:
    main.main(command(cache_dir=tmp_path / "none"))
  assert (refused.value.code, refused.value.kind) == (66, "cache_missing")
  assert refused.value.fix == (
    f"anystep-cache --tasks=tiny_span_corruption --output_cache_dir={tmp_path / 'none'}"
    " --module_import=tiny_tasks; or add --cache_if_missing"
  )


def test_all_that_is_checked_is_checked_before_a_device_is_touched(command, monkeypatch):
  """A run that gets as far as `PreparedRun.run` has passed every check of data and configuration."""
  program = (
    "import sys; from anystep.train import main; main.prepare(sys.argv);"
    "from jax._src import xla_bridge; print('touched', xla_bridge.backends_are_initialized())"
  )
  done = subprocess.run(
    [sys.executable, "-c", program, *command()[1:]],
    capture_output=True,
    text=True,
    env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[2:0:-1]))},
    check=True,
  )
  assert done.stdout.endswith("touched False\n")
  monkeypatch.setattr(PreparedRun, "run", lambda *_, **named: pytest.fail("it was to be refused before"))
  with pytest.raises(AnystepError):
    main.main(command(BATCH_SIZE=0))


@pytest.mark.parametrize(
  ("lengths", "cut", "is_much"),
  [
    ("{'inputs': 1000, 'targets': 400}", "no example is cut to inputs 1,000, targets 400", False),
    ("{'inputs': 6, 'targets': 4}", "of examples and ", True),
  ],
)
def test_what_rows_cut_is_said_before_training(lengths, cut, is_much, command, capsys):
  main.main([*command(TASK_FEATURE_LENGTHS=lengths), "--dry_run"])
  said = capsys.readouterr()
  (line,) = [line for line in said.out.splitlines() if line.startswith("tiny_span_corruption train: ")]
  assert cut in line
  assert ("WARNING: much of tiny_span_corruption train is cut" in said.err) == is_much


@pytest.mark.parametrize(
  ("bindings", "kind"),
  [
    ({"optimizers.adafactor.learning_rate": "@learning_rates.learning_rate_schedule"}, "learning_rate"),
    ({"EVALUATE_AVERAGE": True}, "parameter_average"),
  ],
)
def test_a_dry_run_finds_what_a_step_cannot_compute(bindings, kind, command):
  with pytest.raises(AnystepError) as refused:
    main.main([*command(**bindings), "--dry_run"])
  assert refused.value.kind == kind


def test_the_program_ends_with_the_status_and_one_line_on_stderr(monkeypatch, capsys):
  monkeypatch.setattr(sys, "argv", ["anystep-train", "--gin_file=nowhere.gin"])
  with pytest.raises(SystemExit) as ended:
    main.run()
  assert ended.value.code == 78
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("ERROR code=78 kind=gin_file path=nowhere.gin got=")
  assert line.endswith('fix="correct the file, or --gin_file and --gin_search_paths"')


def test_help_lists_the_flags(capsys):
  with pytest.raises(SystemExit) as ended:
    main.main(["anystep-train", "--help"])
  assert ended.value.code == 0
  printed = capsys.readouterr().out
  assert "--gin_file" in printed
  assert "--gin.NAME=value" in printed
  assert "\nexamples:\n  anystep-train --gin_file=" in printed


def test_a_gin_file_is_found_in_the_search_paths(command, tmp_path):
  (tmp_path / "own").mkdir()
  (tmp_path / "own" / "longer.gin").write_text("TRAIN_STEPS = 12\n")
  prepared = main.prepare(
    [
      *(a for a in command() if "TRAIN_STEPS" not in a),
      "--gin_file=longer.gin",
      f"--gin_search_paths={tmp_path}/own",
    ]
  )
  assert prepared.trainer.total_steps == 12
