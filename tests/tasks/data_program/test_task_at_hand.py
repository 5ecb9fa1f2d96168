"""With the task at hand, `anystep-data` knows what comes after the cache: what a model gets, what is cut."""

import json
import pathlib
import sys

import caches
import numpy as np
import pytest
import seqio

from anystep.errors import AnystepError
from anystep.features.converter_names import converter_to_json
from anystep.features.converters import (
  EncoderDecoderConverter,
  FeatureConverter,
  LMConverter,
  MaxTextConverter,
  PassThroughConverter,
)
from anystep.inspection.read_lengths import count_read_lengths
from anystep.plans.plan import Plan
from anystep.streams.stream import open_stream
from anystep.tasks import preprocessors
from anystep.tasks.data_program.main import main
from anystep.tasks.reading.task_reader import TaskReader
from anystep.tasks.registry.fingerprint import reader_part
from anystep.tasks.vocabularies.decoding import decode_readable

VOCABULARY = seqio.ByteVocabulary(extra_ids=10)
# Span corruption's longest chunk of these is 16 tokens, less than most examples have.
SHORT = {"inputs": 16, "targets": 8}
LONG = {"inputs": 60, "targets": 40}


def register():
  """Registers the tasks and the mixture, as the module that the command lines name would."""
  spans = [preprocessors.span_corruption, seqio.preprocessors.append_eos]
  for name, after in {"spans": spans, "more_spans": spans, "plain": []}.items():
    if name not in seqio.TaskRegistry.names():
      outputs = ["inputs", "targets"] if after else ["targets"]
      seqio.TaskRegistry.add(
        name,
        source=seqio.FunctionDataSource(lambda split, shuffle_files: None, splits=["train"]),
        preprocessors=[seqio.CacheDatasetPlaceholder(), *after],
        output_features={output: seqio.Feature(VOCABULARY) for output in outputs},
      )
  if "both" not in seqio.MixtureRegistry.names():
    seqio.MixtureRegistry.add("both", [("spans", 3), ("more_spans", lambda task: len(task.name) / 20)])


def example_of(ordinal):
  text = f"{ordinal}: " + "größer " * (ordinal % 5 + 1)
  return {"targets": np.array(VOCABULARY.encode(text), np.int32)}


def build(root, task, **options):
  built = caches.build(
    root,
    task=task,
    features={"targets": caches.FEATURES["targets"]},
    example_of=example_of,
    **options,
  )

  def sign(document):
    reader = reader_part(seqio.TaskRegistry.get(task), cache_at="placeholder", task_feature_lengths=None)
    sha256 = caches.Fingerprint(reader=reader, provenance={}).reader_sha256
    document["fingerprint"] = {"reader_sha256": sha256, "reader": reader, "provenance": {}}

  caches.tamper(built, sign)
  return built


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory):
  """A module in the current directory, and what it registers."""
  directory = tmp_path_factory.mktemp("module")
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(directory)
    patch.setattr(sys, "path", [*sys.path])
    pathlib.Path("tasks_at_hand.py").write_text("")
    register()
    yield
    seqio.MixtureRegistry.remove("both")
    for name in ("spans", "more_spans", "plain"):
      seqio.TaskRegistry.remove(name)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  path = tmp_path_factory.mktemp("hand")
  build(path, "spans", num_examples=24)
  build(path, "more_spans", num_examples=12, num_shards=2)
  build(path, "plain", num_examples=9, num_shards=1)
  return path


def open_named(root, task):
  return caches.SmallCache(root=root, task=task, split="train", examples=()).open()


def start(root, lengths, packing="none", task="spans"):
  """The plan over one task, its cache and its reader."""
  cache = open_named(root, task)
  reader = TaskReader(seqio.TaskRegistry.get(task), cache, lengths)
  plan = Plan.start(
    cache, batch_size=4, feature_lengths=lengths, packing=packing, transforms={task: reader}, num_epochs=1
  )
  return plan, cache, reader


def run(capsys, *arguments, status=0):
  """The lines on stdout and on stderr."""
  assert main([str(argument) for argument in arguments]) == status
  captured = capsys.readouterr()
  return captured.out.splitlines(), captured.err.splitlines()


def run_json(capsys, *arguments):
  lines, notes = run(capsys, *arguments, "--format=jsonl")
  return [json.loads(line) for line in lines], notes


def flags(root, lengths, *more, task="spans"):
  """Flags for the plan that `start` makes."""
  return [
    f"--cache_dir={root}",
    f"--task={task}",
    "--batch_size=4",
    "--num_epochs=1",
    f"--feature_lengths={json.dumps(lengths)}",
    "--module_import=tasks_at_hand",
    *more,
  ]


# Show

MODELS: dict[str, FeatureConverter] = {
  "encoder_decoder": EncoderDecoderConverter(),
  "lm": LMConverter(),
  "maxtext": MaxTextConverter(),
  "pass_through": PassThroughConverter(),
}


def values_of(feature):
  return feature["ids"] if "ids" in feature else feature["values"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("packing", ["none", "greedy"])
def test_shown_rows_are_the_streams(root, capsys, model, packing):
  plan, cache, reader = start(root, LONG, packing)
  with open_stream(
    plan, {"spans": cache}, feature_converter=MODELS[model], transforms={"spans": reader}
  ) as stream:
    batch = stream.batch(1)
  rows, notes = run_json(
    capsys, "show", *flags(root, LONG, f"--packing={packing}"), "--steps=1:2", f"--model={model}"
  )
  assert notes == []
  assert len(rows) > 1
  for row in rows:
    assert len(row["examples"]) == 1 or packing != "none"
    for name, feature in batch.items():
      joined = [value for example in row["examples"] for value in values_of(example["features"][name])]
      expected = feature[row["row"]].tolist()
      assert joined == expected[: len(joined)]
      assert packing != "none" or len(joined) == len(expected)
      # A decoder's input goes on behind the last example.
      assert not any(expected[len(joined) + 1 :])
    for example in row["examples"]:
      assert example["features"].keys() == batch.keys()
      for feature in example["features"].values():
        if "ids" in feature:
          assert feature["text"] == decode_readable(np.array(feature["ids"]), VOCABULARY)
    if packing != "none":
      assert all(0 < used <= total for used, total in row["used"].values())
  if packing != "none":
    assert max(len(row["examples"]) for row in rows) > 1


def test_spans_ends_and_masks_are_there_to_be_read(root, capsys):
  lines, _ = run(capsys, "show", *flags(root, LONG), "--steps=0:1", "--row=1", "--model=encoder_decoder")
  assert lines[0].startswith("step 0 row 1: spans train epoch 0 ")
  shown = dict(line.strip().split(" ", 1) for line in lines[1:])
  assert list(shown) == [
    "encoder_input_tokens",
    "decoder_target_tokens",
    "decoder_input_tokens",
    "decoder_loss_weights",
  ]
  assert shown["encoder_input_tokens"].startswith("(60): ")
  for name in ("encoder_input_tokens", "decoder_target_tokens"):
    assert "<0>" in shown[name]
    assert shown[name].endswith("</s>")
  assert shown["decoder_input_tokens"].startswith("(40): <pad><0>")
  used = shown["decoder_loss_weights"].split(" ")
  assert used[:2] == ["(40):", "1"]
  counts = [int(word.strip("×,")) for word in used if "×" in word]
  assert sum(counts) == 40


def test_packed_examples_stand_apart_with_what_is_left_of_the_row(root, capsys):
  longer = {name: 3 * length for name, length in LONG.items()}
  arguments = ["show", *flags(root, longer, "--packing=greedy"), "--steps=0:1", "--row=0"]
  lines, _ = run(capsys, *arguments, "--model=encoder_decoder")
  ((row,), _) = run_json(capsys, *arguments, "--model=encoder_decoder")
  heads = [line for line in lines if ", example " in line]
  assert len(heads) == len(row["examples"]) > 1
  (used, total) = row["used"]["encoder_segment_ids"]
  assert f"encoder_segment_ids {used} of {total}" in lines[-1]
  assert sum(" decoder_positions (" in line and ": 0 to " in line for line in lines) == len(heads)


def test_a_tombstone_shows_as_weights_of_zero(root, tmp_path, capsys):
  plan, *_ = start(root, LONG)
  (tmp_path / "plan.json").write_text(plan.to_json())
  ((row, *_), _) = run_json(
    capsys, "what-was-at", f"--plan={tmp_path}/plan.json", f"--cache_dir={root}", "--steps=1:2"
  )
  index, number = row["examples"][0]["index"], row["row"]
  tombstone = ["tombstone", f"--cache_dir={root}", "--task=spans", f"--index={index}"]
  run(capsys, *tombstone, f"--output={tmp_path}/list.json")
  change = ["plan", "tombstone", f"--plan={tmp_path}/plan.json", f"--list={tmp_path}/list.json", "--step=1"]
  run(capsys, *change, f"--output={tmp_path}/new.json")
  where = [f"--cache_dir={root}", "--module_import=tasks_at_hand", "--steps=1:2", f"--row={number}"]
  weights = []
  for name in ("plan", "new"):
    command = ["show", f"--plan={tmp_path}/{name}.json", *where, "--model=encoder_decoder"]
    ((row,), _) = run_json(capsys, *command)
    weights.append(sum(row["examples"][0]["features"]["decoder_loss_weights"]["values"]))
  assert weights[0] > weights[1] == 0


def test_a_runs_converter_is_the_one_that_its_directory_names(root, tmp_path, capsys):
  plan, *_ = start(root, LONG)
  (tmp_path / "data_plan.json").write_text(plan.to_json())
  (tmp_path / "data_caches.json").write_text(json.dumps({"version": 1, "cache_dirs": [str(root)]}))
  command = ["show", f"--model_dir={tmp_path}", "--module_import=tasks_at_hand", "--steps=0:1", "--row=0"]
  ((row,), notes) = run_json(capsys, *command)
  assert row["examples"][0]["features"].keys() == {"inputs", "targets"}
  (note,) = notes
  assert "data_converter.json" in note
  assert "--model=NAME" in note
  (tmp_path / "data_converter.json").write_text(json.dumps(converter_to_json(LMConverter(bos_id=77))))
  ((row,), notes) = run_json(capsys, *command)
  features = row["examples"][0]["features"]
  assert (notes, features["decoder_input_tokens"]["ids"][0]) == ([], 77)
  ((row,), notes) = run_json(capsys, *command, "--model=maxtext")
  assert (notes, "targets_segmentation" in row["examples"][0]["features"]) == ([], True)


def test_without_the_task_rows_are_shown_as_cached_with_a_word(root, capsys):
  arguments = [flag for flag in flags(root, LONG) if not flag.startswith("--module_import")]
  rows, notes = run_json(capsys, "show", *arguments, "--steps=0:1")
  (note,) = notes
  assert note.startswith("examples are shown as they are cached")
  assert "--module_import=MODULE_OF_THE_TASK" in note
  cached, notes = run_json(capsys, "show", *arguments, "--steps=0:1", "--cached")
  assert (cached, notes) == (rows, [])
  cache = open_named(root, "spans")
  for row in rows:
    (example,) = row["examples"]
    text = decode_readable(cache[example["index"]]["targets"], VOCABULARY)
    assert example["features"] == {
      "targets": {"length": len(cache[example["index"]]["targets"]), "text": text}
    }


def test_a_plan_that_says_that_nothing_follows_the_cache_needs_no_module(root, tmp_path, capsys):
  plan, *_ = start(root, {"targets": 12}, task="plain")
  (tmp_path / "plan.json").write_text(plan.to_json())
  where = [f"--plan={tmp_path}/plan.json", f"--cache_dir={root}"]
  rows, notes = run_json(capsys, "show", *where, "--steps=0:1", "--model=lm")
  assert notes == []
  assert all(len(row["examples"][0]["features"]["decoder_target_tokens"]["ids"]) == 12 for row in rows)
  objects, _ = run_json(capsys, "stats", *where, "--steps=0:1")
  assert objects[0]["read"]["cut_examples"] > 0


# What is cut


def test_stats_count_what_the_model_gets(root, capsys):
  for lengths in (SHORT, LONG):
    _, cache, reader = start(root, lengths)
    expected = count_read_lengths(cache, reader, feature_lengths=lengths)
    objects, _ = run_json(capsys, "stats", *flags(root, lengths))
    assert objects[0]["read"] == json.loads(json.dumps(expected.to_json()))
    lines, _ = run(capsys, "stats", *flags(root, lengths))
    assert "Tokens of spans train, as read" in lines
    assert expected.describe_cut() in lines
  # The cached pieces are longer than a row's inputs, and none is cut.
  assert max(len(example_of(k)["targets"]) for k in range(24)) < 60
  assert expected.cut_examples == 0


def test_stats_without_the_task_say_what_they_cannot_know(root, capsys):
  arguments = [flag for flag in flags(root, SHORT) if not flag.startswith("--module_import")]
  objects, _ = run_json(capsys, "stats", *arguments)
  assert objects[0]["read"] is None
  assert "cut_examples" not in objects[0]["features"]["targets"]
  lines, _ = run(capsys, "stats", *arguments)
  assert lines[-1].startswith("What rows cut is not known: ")
  assert lines[-1].endswith("add --module_import=MODULE_OF_THE_TASK.")
  lines, _ = run(capsys, "stats", f"--cache_dir={root}", "--task=spans")
  assert lines[-1].endswith("add --feature_lengths.")


def test_a_page_has_what_is_cut_and_is_named(root, tmp_path, capsys):
  path = tmp_path / "page.html"
  _, notes = run(capsys, "stats", *flags(root, SHORT), f"--html={path}")
  assert notes == [f"{path}: a page of spans"]
  _, cache, reader = start(root, SHORT)
  assert count_read_lengths(cache, reader, feature_lengths=SHORT).describe_cut() in path.read_text()


def test_shares_of_tokens_are_those_that_are_read(root, capsys):
  mixture = [
    "--rates=spans=1,plain=1",
    "--batch_size=4",
    "--steps=0:6",
    f"--feature_lengths={json.dumps(SHORT)}",
  ]
  objects, _ = run_json(capsys, "stats", f"--cache_dir={root}", *mixture, "--module_import=tasks_at_hand")
  shares = {share["task"]: share for share in objects[2:]}
  means = {}
  for task in ("spans", "plain"):
    _, cache, reader = start(root, SHORT, task=task)
    means[task] = count_read_lengths(cache, reader, feature_lengths=SHORT).mean_tokens
  tokens = {task: means[task] * share["rows"] for task, share in shares.items()}
  for task, share in shares.items():
    assert share["tokens_as"] == "read"
    assert share["token_percent"] == pytest.approx(100 * tokens[task] / sum(tokens.values()))
    assert (share["examples"], share["example_percent"]) == (share["rows"], share["real_percent"])
  objects, _ = run_json(capsys, "stats", f"--cache_dir={root}", *mixture)
  assert {share["tokens_as"] for share in objects[2:]} == {"cached"}


@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "long"])
def test_a_plan_that_starts_says_what_is_cut_and_warns(root, tmp_path, capsys, lengths):
  plan, cache, reader = start(root, lengths)
  lines, notes = run(capsys, "plan", "start", *flags(root, lengths), f"--output={tmp_path}/plan.json")
  assert (tmp_path / "plan.json").read_text() == plan.to_json()
  told = count_read_lengths(cache, reader, feature_lengths=lengths).describe_cut()
  if lengths is SHORT:
    assert notes == [f"WARNING: {told}"]
    assert len(lines) == 1
  else:
    assert (lines[1:], notes) == ([told], [])
    assert told.startswith("spans train: no example is cut")


def test_a_prefix_lms_plan_cuts_inputs_and_targets_together(root, tmp_path, capsys):
  command = ["plan", "start", *flags(root, {"targets": 10}, task="plain"), f"--output={tmp_path}/plan.json"]
  _, notes = run(capsys, *command)
  assert "targets 10" in notes[0]
  _, notes = run(capsys, *command, "--overwrite", "--model=lm")
  assert "targets 10" in notes[0]


# Rates


def test_a_registered_mixtures_name_stands_for_its_rates(root, tmp_path, capsys):
  common = [f"--cache_dir={root}", "--module_import=tasks_at_hand"]
  lengths = f"--feature_lengths={json.dumps(LONG)}"
  plans = {}
  for name, rates in {"named": "both", "written": "spans=3,more_spans=0.5"}.items():
    path = tmp_path / f"{name}.json"
    run(capsys, "plan", "start", f"--rates={rates}", *common, "--batch_size=7", lengths, f"--output={path}")
    plans[name] = Plan.from_json(path.read_text())
  assert plans["named"].segments[0].quotas == plans["written"].segments[0].quotas
  assert set(plans["named"].segments[0].quotas.values()) == {1, 6}
  plan, *_ = start(root, LONG)
  (tmp_path / "spans.json").write_text(plan.to_json())
  change = ["plan", "change", f"--plan={tmp_path}/spans.json", "--step=1", "--rates=both", *common]
  run(capsys, *change, f"--output={tmp_path}/changed.json")
  changed = Plan.from_json((tmp_path / "changed.json").read_text())
  assert changed.segments[1].quotas == plans["named"].segments[0].quotas
  rows, _ = run_json(
    capsys, "what-was-at", "--rates=both", *common, "--batch_size=13", lengths, "--steps=0:1"
  )
  assert {row["task"] for row in rows} == {"spans", "more_spans"}


def refusal(*arguments):
  with pytest.raises(AnystepError) as refused:
    main([str(argument) for argument in arguments])
  return refused.value


def test_a_mixture_that_nothing_registers_is_refused(root, tmp_path):
  command = ["plan", "start", f"--cache_dir={root}", "--batch_size=8", f"--output={tmp_path}/plan.json"]
  error = refusal(*command, "--rates=both")
  assert (error.kind, "--module_import=" in error.fix) == ("arguments", True)
  error = refusal(*command, "--rates=boht", "--module_import=tasks_at_hand")
  assert (error.kind, error.fields["nearest"]) == ("task_unknown", "both")
  error = refusal(*command, "--rates=both,spans=1", "--module_import=tasks_at_hand")
  assert error.kind == "arguments"
  error = refusal(*command, "--rates=both", "--rates=spans=1", "--module_import=tasks_at_hand")
  assert (error.kind, "spans" in error.fields["got"]) == ("arguments", True)
