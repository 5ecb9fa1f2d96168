"""What anystep 0.1 made of `earlier_tasks`, kept in tests/fixtures/version_0_1, and how it was made.

`python tests/earlier_version.py DIRECTORY` makes it all. It uses programs and public names alone, so that
every version can run it.

The directory is where programs run:

- `texts`, `caches/rows`: what the tasks' sources read;
- `caches`: preshuffled caches, in ArrayRecord and TFRecord files, and two that describe `rows` as they are;
- `plans`, `units`: a mixture that was changed, a packed one, tombstones, and their unit tables;
- `model`: a run that ended at step 2;
- `expected`: what each of COMMANDS printed; digests and losses of the run's first four steps, and of a run
  without dropout from its beginning (`steps_without_dropout.json`) and from that run's step 2.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import pathlib
import shutil
import sys
from typing import Any
from unittest import mock

import tensorflow as tf

FIXTURE = pathlib.Path(__file__).parent / "fixtures" / "version_0_1"
PRESHUFFLED = {"early_texts": "array_record", "early_reverse_3": "tfrecord", "early_spans": "tfrecord"}
AS_IS = ("early_parquet", "early_records")
LENGTHS = {"inputs": 16, "targets": 16}
NUM_STEPS = 12
# Where the run of the fixture ended, and where its continuation does.
SAVED_STEP, LAST_STEP = 2, 4
_MODULE = "--module_import=earlier_tasks"
_CACHE = "--cache_dir=caches"
_STEPS = f"--steps=0:{NUM_STEPS}"
_LENGTHS = f"--feature_lengths={json.dumps(LENGTHS)}"
# The run of the fixture has dropout, whose masks were others in version 0.1.
WITHOUT_DROPOUT = ("--accept_change=model.module.config.dropout_rate",)
PLANS = {
  "single": ["start", _CACHE, "--task=early_reverse_3", "--batch_size=4", "--num_epochs=2", "--seed=3"],
  "mixture": [
    *("start", _CACHE, "--rates=early_texts=0.6,early_reverse_3=0.4", "--batch_size=4", "--seed=5"),
    *(_LENGTHS, _MODULE),
  ],
  "changed": [
    *("change", "--plan=plans/mixture.json", _CACHE, "--step=5", "--rates=early_texts=0.2,early_spans=0.8"),
    *("--batch_size=6", "--reason=more spans", _MODULE),
  ],
  "skipped": ["skip", "--plan=plans/changed.json", "--steps=7:9", "--reason=a spike"],
  "tombstones": ["tombstone", "--plan=plans/skipped.json", "--list=plans/list.json", "--step=9"],
  "packed": [
    *("start", _CACHE, "--task=early_texts", "--batch_size=2", "--packing=best_fit"),
    *('--feature_lengths={"inputs": 40, "targets": 40}', _MODULE),
  ],
  "as_is": ["start", _CACHE, "--rates=early_parquet=1,early_records=2", "--batch_size=3", _MODULE, _LENGTHS],
}
# By name, arguments of `anystep-data`.
COMMANDS = {
  **{
    f"rows_{plan}": ["what-was-at", f"--plan=plans/{plan}.json", _CACHE, _STEPS, "--format=jsonl"]
    for plan in PLANS
  },
  "rows_as_text": ["what-was-at", "--plan=plans/changed.json", _CACHE, "--steps=4:6"],
  **{
    f"values_{plan}": [
      "show",
      "--cached",
      f"--plan=plans/{plan}.json",
      _CACHE,
      _STEPS,
      _MODULE,
      "--format=jsonl",
    ]
    for plan in PLANS
  },
  "values_as_text": ["show", "--cached", "--plan=plans/tombstones.json", _CACHE, "--steps=4:6", _MODULE],
  "when": [
    *("when-was", "--plan=plans/changed.json", _CACHE, "--task=early_texts", "--index=3", _STEPS),
    "--format=jsonl",
  ],
  "history": ["plan", "show", "--plan=plans/tombstones.json"],
  "batch": ["plan", "batch", "--plan=plans/packed.json", _CACHE, "--step=3"],
  "stats": ["stats", _CACHE, "--task=early_texts", "--format=jsonl"],
  "verified": ["verify", _CACHE, "--task=early_texts"],
  "preview": ["preview", "--task=early_spans", _MODULE, "--n=2", _LENGTHS],
  "of_the_run": ["what-was-at", "--model_dir=model", f"--steps=0:{SAVED_STEP}", "--format=jsonl"],
}


def run(program: str, *arguments: str) -> str:
  """Runs a console program in this process; returns what it printed."""
  (entry,) = importlib.metadata.entry_points(group="console_scripts", name=program)
  printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
  with mock.patch.object(sys, "argv", [program, *arguments]), contextlib.redirect_stdout(printed):
    status = None
    try:
      entry.load()()
    except SystemExit as end:
      status = end.code
  if status:
    raise RuntimeError(f"{program} {' '.join(arguments)} ended with {status}")
  return printed.buffer.getvalue().decode()  # type: ignore[attr-defined]


def make_caches(root: str) -> None:
  """Caches all tasks below a root."""
  for task, container in PRESHUFFLED.items():
    run(
      *("anystep-cache", _MODULE, f"--tasks={task}", f"--output_cache_dir={root}", "--num_shards=2"),
      *("--splits=train", "--block_records=4", f"--output_format={container}", "--seed=7"),
    )
  run("anystep-cache", _MODULE, f"--tasks={','.join(AS_IS)}", f"--output_cache_dir={root}", "--index_only")


def make_plans() -> None:
  """Makes every plan, in `plans`."""
  run(
    *(
      "anystep-data",
      "tombstone",
      _CACHE,
      "--task=early_texts",
      "--index=1",
      "--index=4",
      "--reason=private",
    ),
    "--output=plans/list.json",
  )
  for name, arguments in PLANS.items():
    command, *others = arguments
    run("anystep-data", "plan", command, *others, f"--output=plans/{name}.json")


def train(last_step: int, *flags: str, dropout_rate: float = 0.1) -> None:
  """Trains in `model` up to a step, from where it is."""
  sizes = {"emb_dim": 8, "num_heads": 2, "head_dim": 4, "mlp_dim": 16}
  layers = {"num_encoder_layers": 1, "num_decoder_layers": 1}
  values = {
    "MODEL_DIR": "'model'",
    "CACHE_DIR": "'caches'",
    "MIXTURE_OR_TASK_NAME": "'early_mixture'",
    "MIXTURE_OR_TASK_MODULE": "'earlier_tasks'",
    "TASK_FEATURE_LENGTHS": repr(LENGTHS),
    "TRAIN_STEPS": last_step,
    "CHECKPOINT_PERIOD": SAVED_STEP,
    "BATCH_SIZE": 8,
    "EVAL_DATASET": None,
    "DROPOUT_RATE": dropout_rate,
    **{f"network.T5Config.{name}": value for name, value in {**sizes, **layers}.items()},
  }
  run(
    *("anystep-train", "--gin_file=gin_configs/examples/stdlib_tiny.gin"),
    *(f"--gin.{name}={value}" for name, value in values.items()),
    *flags,
  )


def steps_of_the_run() -> list[dict[str, Any]]:
  """The run's step logs, start by start: step, digest of the batch, loss."""
  logs = sorted((pathlib.Path("model") / "step_log").glob("*.jsonl"))
  return [json.loads(line) for log in logs for line in log.read_text().splitlines()]


def sha256_of_files(root: str) -> dict[str, str]:
  """sha256 of every file below, by relative path."""
  return {
    str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
    for path in sorted(pathlib.Path(root).rglob("*"))
    if path.is_file()
  }


def make(directory: pathlib.Path) -> None:
  """Makes the fixture."""
  directory.mkdir(parents=True)
  with contextlib.chdir(directory):
    _make_sources()
    make_caches("caches")
    pathlib.Path("plans").mkdir()
    make_plans()
    train(SAVED_STEP)
    # Wherever the fixture lies.
    pathlib.Path("model", "data_caches.json").write_text('{"version": 1, "cache_dirs": ["caches"]}')
    pathlib.Path("expected").mkdir()
    for name, arguments in COMMANDS.items():
      pathlib.Path("expected", f"{name}.txt").write_text(run("anystep-data", *arguments))
    shutil.copytree("model", "saved")
    train(LAST_STEP)
    text = "".join(json.dumps(step) + "\n" for step in steps_of_the_run())
    pathlib.Path("expected", "steps.jsonl").write_text(text)
    without_dropout = {}
    for from_step in (SAVED_STEP, 0):
      shutil.rmtree("model")
      if from_step:
        shutil.copytree("saved", "model")
      train(LAST_STEP, *WITHOUT_DROPOUT, dropout_rate=0.0)
      without_dropout[str(from_step)] = steps_of_the_run()
    path = pathlib.Path("expected", "steps_without_dropout.json")
    path.write_text(json.dumps(without_dropout, indent=1) + "\n")
    shutil.rmtree("model")
    pathlib.Path("saved").rename("model")


def _make_sources() -> None:
  """Texts of 1 to 40 words, and rows of such texts."""
  import pyarrow as pa
  import pyarrow.parquet as pq
  from array_record.python.array_record_module import ArrayRecordWriter

  words = ("a", "batch", "of", "step", "t", "is", "pure", "function")
  texts = [" ".join(words[(k * j) % 8] for j in range(1, 2 + k % 40)) for k in range(1, 61)]
  for folder in ("texts", "caches/rows"):
    pathlib.Path(folder).mkdir(parents=True)
  for name, own in (("train-0", texts[:30]), ("train-1", texts[30:50]), ("validation", texts[50:])):
    lines = "".join(json.dumps({"text": text}) + "\n" for text in own)
    pathlib.Path("texts", f"{name}.jsonl").write_text(lines)
  pq.write_table(pa.table({"targets": texts[:25]}), "caches/rows/rows.parquet", row_group_size=8)
  writer = ArrayRecordWriter("caches/rows/rows.array_record", "group_size:4")
  for text in texts[25:50]:
    example = tf.train.Example()
    example.features.feature["targets"].bytes_list.value.append(text.encode())
    writer.write(example.SerializeToString())
  writer.close()


if __name__ == "__main__":
  make(pathlib.Path(sys.argv[1]))
