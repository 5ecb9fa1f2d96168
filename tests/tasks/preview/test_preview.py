"""A preview shows what SeqIO's own pipeline makes of the same examples, and where it fails."""

import contextlib
import functools
import html.parser
import io
import json
import re

import caches
import numpy as np
import pytest
import seqio
import small_tasks
import tensorflow as tf
from job_runs import registered

from anystep.cache_job.preprocessing import example_datasets
from anystep.errors import AnystepError
from anystep.features.ragged import Ragged
from anystep.programs.command_line import run_program
from anystep.tasks.data_program.main import main
from anystep.tasks.preview import text as preview_text
from anystep.tasks.preview.followed_examples import FollowedExamples
from anystep.tasks.preview.page import preview_page
from anystep.tasks.preview.preview import check_previews, preview
from anystep.tasks.preview.stages import describe_step
from anystep.tasks.preview.values import Value
from anystep.tasks.vocabularies.decoding import decode_readable

LENGTHS = {"targets": 24}
LENGTHS_OF_BOTH = {"inputs": 4, "targets": 30}
TOKENIZE = small_tasks.BEFORE_CACHE[2]


def drop_low(dataset):
  """Leaves the examples from the 8th of a shard on."""
  return dataset.filter(lambda example: example["number"] >= 8)


def drop_all(dataset):
  return dataset.filter(lambda example: example["number"] < 0)


def reshuffled(dataset):
  return dataset.shuffle(64, seed=3)


def with_noise(dataset):
  """Draws by a generator that nobody seeds."""
  generator = np.random.default_rng()

  def noise(number):
    return generator.integers(1 << 60) + 0 * number.numpy()

  return dataset.map(
    lambda example: {
      **example,
      "noise": tf.ensure_shape(tf.py_function(noise, [example["number"]], tf.int64), []),
    }
  )


def nested(dataset):
  return dataset.map(
    lambda example: {
      "targets": example["targets"],
      "answers": {
        "texts": tf.strings.split(example["targets"]),
        "rows": tf.RaggedTensor.from_row_lengths([1, 2], [2, 0]),
      },
    }
  )


def misnamed(dataset):
  return dataset.map(lambda example: {"targets": example["text"]})


def forgetful(dataset):
  dataset.map(lambda example: example)


def raise_at(number):
  """A preprocessor that fails at a shard's example of that number."""

  def look(found):
    if int(found) == number:
      raise ValueError(f"{number} is indigestible")
    return found

  def fails(dataset):
    return dataset.map(
      lambda example: {
        **example,
        "number": tf.ensure_shape(tf.py_function(look, [example["number"]], tf.int64), []),
      }
    )

  return fails


def task(*before, after=small_tasks.AFTER_CACHE, name="previewed", **options):
  return small_tasks.task(name, before=before, after=after, **options)


def previewed(made, **options):
  options = {"split": "train", "num_examples": 2, "feature_lengths": LENGTHS} | options
  return preview(made, **options)


def stage_of(made, name):
  (found,) = [stage for stage in made.stages if stage.name == name]
  return found


def labels(stage):
  return [example.label for example in stage.examples]


def texts(stage, feature):
  """A feature of the stage's examples as text."""
  return [example.features[feature].to_json()["text"] for example in stage.examples]


def ids(value):
  return np.asarray(value.values).tolist()


def text_of(made, **options):
  """What a terminal that is no terminal is given."""
  with contextlib.redirect_stdout(io.StringIO()) as out:
    preview_text.print_previews([made], **options)
  return out.getvalue()


def seqio_stages(made, *, source_shard, base_seed=0, lengths=None):
  """The dataset after each preprocessor, by SeqIO's own methods as the cache job calls them."""
  seed = example_datasets.preprocess_seed(made.name, "train", base_seed, source_shard)
  shards = len(made.source.list_shards("train"))
  source = made.source.get_dataset(
    "train", shuffle=False, seed=seed, shard_info=seqio.ShardInfo(source_shard, shards)
  )
  steps = list(made.preprocessors)
  cached = next(k for k, step in enumerate(steps) if isinstance(step, seqio.CacheDatasetPlaceholder))
  for count in range(1, len(steps) + 1):
    part = seqio.Task(
      made.name,
      source=made.source,
      output_features=made.output_features,
      preprocessors=[*steps[: min(count, cached)], steps[cached], *steps[cached + 1 : count]],
    )
    # With fewer steps before the placeholder those after it would draw otherwise, but there are none then.
    dataset = part.preprocess_precache(source, seed=seed)
    yield part.preprocess_postcache(dataset, sequence_length=lengths, seed=seed)


def test_examples_after_each_preprocessor_are_the_cache_jobs_random_ones_too():
  source_shard, base_seed = 2, 5
  made = small_tasks.task("previewed", after=(*small_tasks.AFTER_CACHE, small_tasks.rotate))
  examples = FollowedExamples(
    made,
    split="train",
    source_shard=source_shard,
    skip=0,
    num_examples=3,
    base_seed=base_seed,
    feature_lengths=LENGTHS,
  )
  stages = seqio_stages(made, source_shard=source_shard, base_seed=base_seed, lengths=LENGTHS)
  for step, dataset in zip(made.preprocessors, stages, strict=True):
    examples.step(step)
    found = examples.now.examples
    assert len(found) >= 3
    for ours, theirs in zip(found, dataset, strict=False):
      tf.nest.map_structure(np.testing.assert_array_equal, ours, theirs)


def test_examples_are_followed_where_they_are_dropped_or_become_several():
  made = previewed(task(small_tasks.split_and_drop, TOKENIZE), num_examples=6)
  split = stage_of(made, "split_and_drop")
  assert labels(split) == ["1", "2.0", "4", "5.0"]
  assert [example.siblings for example in split.examples] == [1, 2, 1, 2]
  assert (split.given, list(split.dropped)) == (6, ["0", "3"])
  assert split.left == "4 of 6 left, dropped: 0, 3"
  for stage in made.stages[2:]:
    assert stage.kind == "cache" or labels(stage) == labels(split)
  names = texts(stage_of(made, "append_eos"), "name")
  assert names == [f"train-0-{label.split('.')[0]}" for label in labels(split)]


@pytest.mark.long
def test_a_skipped_to_example_is_what_it_is_among_all():
  skip, made = 5, task(small_tasks.split_and_drop, TOKENIZE, small_tasks.rotate)
  alone = previewed(made, skip=skip, num_examples=1)
  together = previewed(made, skip=0, num_examples=skip + 1)
  for one, several in zip(alone.stages, together.stages, strict=True):
    assert one.name == several.name
    if one.kind != "cache":
      assert one.examples[0].to_json() == several.examples[-1].to_json()


def test_skipping_goes_on_in_the_next_shards_that_have_examples():
  made = task(TOKENIZE, sizes={"train": (0, 4, 0, 9)})
  assert previewed(made, num_examples=1).source_shard == "train part 1"
  far = previewed(made, num_examples=1, skip=6)
  assert (far.source_shard, texts(far.stages[0], "name")) == ("train part 3", ["train-3-2"])


@pytest.mark.parametrize("source", [pytest.param("2", marks=pytest.mark.long), "train part 2"])
def test_a_source_shard_is_named_or_numbered(source):
  found = previewed(task(TOKENIZE), source=source, skip=30)
  assert (found.source_shard, texts(found.stages[0], "name")) == (
    "train part 2",
    ["train-2-30", "train-2-31"],
  )
  few = previewed(task(TOKENIZE), source=source, skip=32)
  assert few.stages[0].notes == ["the source shard has 33 examples"]


def test_what_changed_and_what_is_gone_is_said_of_each_example():
  made = previewed(task(small_tasks.observe, small_tasks.without_names, TOKENIZE))
  said = {
    stage.name: (list(stage.examples[0].changed), list(stage.examples[0].removed))
    for stage in made.stages
    if stage.examples
  }
  assert said["NumberedTexts"] == (["name", "number", "targets"], [])
  assert said["observe"] == ([], [])
  assert said["without_names"] == ([], ["name", "number"])
  assert said["tokenize"] == (["targets"], [])


@pytest.mark.parametrize("step", [small_tasks.join_and_cut, reshuffled], ids=lambda step: step.__name__)
def test_from_what_joins_or_reorders_examples_on_others_are_followed(step):
  made = task(TOKENIZE, after=(step, seqio.preprocessors.append_eos))
  found = previewed(made, num_examples=2)
  stage = stage_of(found, step.__name__)
  assert labels(stage) == ["new 0", "new 1"] == labels(stage_of(found, "append_eos"))
  assert any("beside it" in note for note in stage.notes)
  *_, joined, ended = seqio_stages(made, source_shard=0, lengths=LENGTHS)
  for name, dataset in ((step.__name__, joined), ("append_eos", ended)):
    for example, theirs in zip(stage_of(found, name).examples, dataset, strict=False):
      assert ids(example.features["targets"]) == theirs["targets"].numpy().tolist()


def test_where_none_is_left_the_first_that_are_left_are_shown():
  found = previewed(task(drop_low, TOKENIZE))
  stage = stage_of(found, "drop_low")
  assert stage.left == "0 of 2 left, dropped: 0, 1"
  assert texts(stage, "name") == ["train-0-8", "train-0-9"]
  assert found.stages[-1].kind == "model"


def test_where_nothing_comes_there_is_nothing_to_show():
  found = previewed(task(drop_all, TOKENIZE))
  assert found.error is None
  assert not any(stage.examples for stage in found.stages[1:])
  assert any("nothing is left" in note for note in stage_of(found, "drop_all").notes)


def test_draws_without_seeds_are_pointed_out_and_what_is_shown_goes_on():
  found = previewed(task(with_noise, TOKENIZE))
  stage = stage_of(found, "with_noise")
  assert labels(stage) == ["0", "1"]
  assert any("not by SeqIO's seeds" in note for note in stage.notes)
  drawn = [[ids(example.features["noise"]) for example in s.examples] for s in found.stages[1:3]]
  assert drawn[0] == drawn[1]


def test_features_inside_others_have_paths_for_names():
  made = previewed(task(nested, TOKENIZE), feature_lengths=None, num_examples=1)
  (example,) = stage_of(made, "nested").examples
  assert sorted(example.features) == ["answers/rows", "answers/texts", "targets"]
  assert example.features["answers/texts"].to_json() == {"length": 2, "values": ["train-0-0:", "wörter"]}
  assert isinstance(example.features["answers/rows"].values, Ragged)


def test_bound_arguments_are_named_the_same_in_every_process():
  bound = functools.partial(
    functools.partial(seqio.preprocessors.rekey, key_map={"targets": "text"}),
    fn=small_tasks.square,
    vocabulary=small_tasks.VOCABULARY,
  )
  name, arguments = describe_step(bound)
  assert name == "rekey"
  assert arguments == {"key_map": "{'targets': 'text'}", "fn": "square", "vocabulary": "ByteVocabulary"}
  assert stage_of(previewed(task(TOKENIZE), num_examples=1), "tokenize").bound == "(copy_pretokenized=False)"


# Failures


def test_what_a_preprocessor_raises_is_shown_with_the_example_that_it_was_given():
  found = previewed(task(small_tasks.observe, raise_at(1), TOKENIZE))
  assert [stage.name for stage in found.stages] == ["NumberedTexts", "observe", "fails"]
  stage = found.stages[-1]
  assert (stage.problem, labels(stage), texts(stage, "name")) == (
    "ValueError: 1 is indigestible",
    ["1"],
    ["train-0-1"],
  )
  error = found.error
  assert (error.code, error.kind) == (65, "preprocessor_failed")
  assert error.fields == {
    "task": "previewed",
    "split": "train",
    "source_shard": "train part 0",
    "preprocessor": "fails",
    "example": "1",
    "got": "ValueError: 1 is indigestible",
  }


def test_an_example_that_is_not_asked_for_may_fail():
  found = previewed(task(raise_at(2), TOKENIZE))
  assert found.error is None
  assert labels(found.stages[-1]) == ["0", "1"]


def test_a_preprocessor_that_cannot_be_built_says_which_line_of_it():
  found = previewed(task(misnamed, TOKENIZE))
  stage = found.stages[-1]
  assert re.fullmatch(r"KeyError: 'text' \(test_preview\.py, line \d+\)", stage.problem)
  assert labels(stage) == ["0"]
  assert found.error.fields["preprocessor"] == "misnamed"


def test_a_preprocessor_that_returns_nothing_fails_like_any_other():
  found = previewed(task(forgetful, TOKENIZE))
  assert found.stages[-1].problem == "TypeError: a tf.data.Dataset is to be returned, not NoneType"
  assert (found.error.kind, found.error.fields["preprocessor"]) == ("preprocessor_failed", "forgetful")


def test_a_preprocessor_that_ours_refuses_keeps_its_kind():
  from anystep.tasks.preprocessors import span_corruption

  made = seqio.Task(
    "previewed",
    source=small_tasks.NumberedTexts(),
    preprocessors=[TOKENIZE, seqio.CacheDatasetPlaceholder(), span_corruption],
    output_features={name: seqio.Feature(small_tasks.VOCABULARY) for name in ("inputs", "targets")},
  )
  found = previewed(made, feature_lengths={"inputs": 2, "targets": 2})
  assert (found.error.code, found.error.kind) == (78, "feature_length")
  assert (found.error.fields["task"], found.error.fields["preprocessor"]) == ("previewed", "span_corruption")


def test_features_that_are_not_the_tasks_end_the_preview_after_the_preprocessors():
  found = previewed(task(after=()))
  assert (found.error.code, found.error.kind) == (78, "output_features")
  assert found.error.fields["task"] == "previewed"
  assert [stage.kind for stage in found.stages] == ["source", "cache"]


# Lengths and the model


@pytest.mark.parametrize("length", [5, 24, 500])
def test_what_is_cut_and_what_is_kept_are_the_whole(length):
  found = previewed(
    task(TOKENIZE, after=(seqio.preprocessors.append_eos,)), feature_lengths={"targets": length}
  )
  before, cut = stage_of(found, "append_eos"), stage_of(found, "cut to lengths")
  for whole, example in zip(before.examples, cut.examples, strict=True):
    value, tokens = example.features["targets"], ids(whole.features["targets"])
    assert (value.kept, value.cut) == (min(length, len(tokens)), max(len(tokens) - length, 0))
    assert value.to_json().get("cut_text", "") == decode_readable(
      np.array(tokens[length:], int), small_tasks.VOCABULARY
    )
    assert (
      ids(found.stages[-1].examples[0].features["decoder_target_tokens"])[:length]
      == (ids(before.examples[0].features["targets"])[:length] + [0] * length)[:length]
    )


def two_features(dataset):
  """The number in the text as inputs."""
  return dataset.map(
    lambda example: {"inputs": tf.strings.as_string(example["number"] * 12345), "targets": example["targets"]}
  )


def pair_task():
  vocabulary = small_tasks.VOCABULARY
  return seqio.Task(
    "pairs",
    source=small_tasks.NumberedTexts(),
    preprocessors=[two_features, TOKENIZE, seqio.preprocessors.append_eos],
    output_features={name: seqio.Feature(vocabulary) for name in ("inputs", "targets")},
  )


@pytest.mark.parametrize(
  ("model", "converter"),
  [
    (None, seqio.EncDecFeatureConverter(pack=False)),
    ("lm", seqio.LMFeatureConverter(pack=False)),
    ("pass_through", seqio.PassThroughFeatureConverter()),
  ],
)
def test_the_models_features_are_seqios(model, converter):
  made, lengths = pair_task(), LENGTHS_OF_BOTH
  found = previewed(made, feature_lengths=lengths, model=model)
  info = seqio.ShardInfo(0, 4)
  dataset = made.get_dataset(lengths, "train", use_cached=False, shuffle=False, seed=0, shard_info=info)
  names = ("targets",) if model == "lm" else ("inputs", "targets")
  dataset = dataset.map(lambda example: {name: example[name] for name in names})
  expected = list(converter(dataset, {name: lengths[name] for name in names}).take(2).as_numpy_iterator())
  for example, theirs in zip(found.stages[-1].examples, expected, strict=True):
    assert example.features.keys() == theirs.keys()
    for name, value in example.features.items():
      padded = np.zeros(len(value.values), value.values.dtype)
      padded[: len(theirs[name])] = theirs[name]
      assert ids(value) == padded.tolist(), name


@pytest.mark.parametrize(
  ("lengths", "model"), [({"targets": 9}, "lm"), ({"inputs": 4, "targets": 9}, "encoder_decoder")]
)
def test_a_feature_that_a_task_may_have_is_the_models_where_it_has_a_length(lengths, model):
  features = {
    name: seqio.Feature(small_tasks.VOCABULARY, required=name == "targets") for name in LENGTHS_OF_BOTH
  }
  made = pair_task().replace(output_features=features)
  check_previews([made], split="train", feature_lengths=lengths)
  assert previewed(made, num_examples=1, feature_lengths=lengths).stages[-1].name == f"features of {model}"


def test_an_unpacked_prefix_lm_cuts_inputs_and_targets_as_one():
  found = previewed(
    pair_task(), feature_lengths={"inputs": 2, "targets": 10}, model="prefix_lm", num_examples=2
  )
  for example, row in zip(stage_of(found, "cut to lengths").examples, found.stages[-1].examples, strict=True):
    inputs, targets = example.features["inputs"], example.features["targets"]
    assert (inputs.cut, inputs.kept + targets.kept) == (0, 12)
    kept = ids(inputs)[: inputs.kept] + ids(targets)[: targets.kept]
    assert ids(row.features["decoder_target_tokens"]) == kept


def test_packed_rows_hold_the_shown_examples_in_segments():
  found = previewed(
    pair_task(), feature_lengths={"inputs": 32, "targets": 100}, packing="greedy", num_examples=4
  )
  cut, rows = stage_of(found, "cut to lengths"), found.stages[-1]
  by_label = {example.label: example.features for example in cut.examples}
  assert len(rows.examples) < 4
  for row in rows.examples:
    members = row.label.split(", ")
    for name, prefix in (("inputs", "encoder_input"), ("targets", "decoder_target")):
      tokens = [
        token for label in members for token in ids(by_label[label][name])[: by_label[label][name].kept]
      ]
      found_tokens = ids(row.features[f"{prefix}_tokens"])
      assert found_tokens[: len(tokens)] == tokens
      assert not any(found_tokens[len(tokens) :])
    assert max(ids(row.features["decoder_segment_ids"])) == len(members)


def test_without_lengths_nothing_is_cut_and_no_model_is_shown():
  found = previewed(task(TOKENIZE, after=(seqio.preprocessors.append_eos,)), feature_lengths=None)
  assert found.stages[-1].name == "append_eos"
  assert any("--feature_lengths" in note for note in found.notes)


# Values


@pytest.mark.parametrize("text", ["plain text", "ünïcödé – 漢字 😀", " a  b\n", ""])
@pytest.mark.parametrize("vocabulary", ["bytes", "sentencepiece"])
def test_pieces_of_tokens_join_to_their_text(text, vocabulary, sentencepiece):
  vocabulary = small_tasks.VOCABULARY if vocabulary == "bytes" else sentencepiece
  tokens = np.array([*vocabulary.encode(text * 3), vocabulary.vocab_size - 1, *vocabulary.encode("z"), 1])
  value = Value(values=tokens, vocabulary=vocabulary)
  pieces = list(value.pieces(0, len(tokens)))
  assert "".join(piece.text for piece in pieces) == decode_readable(tokens, vocabulary)
  assert [piece.id for piece in pieces] == tokens.tolist()
  assert [piece.text for piece in pieces if piece.is_special] == ["<0>", "</s>"]
  assert list(value.pieces(3, 9)) == pieces[3:9]


@pytest.fixture(scope="module")
def sentencepiece():
  """The model that SeqIO's own tests use."""
  import pathlib

  path = pathlib.Path(seqio.__file__).parent / "test_data/sentencepiece/sentencepiece.model"
  return seqio.SentencePieceVocabulary(str(path), extra_ids=10)


# Text, pages, programs


@pytest.fixture(scope="module")
def hostile():
  """A preview of texts that a terminal or a browser would obey."""

  def spoil(dataset):
    spell = "\x1b[2J[bold]<script>alert(1)</script>:smile:\r\n" + "x" * 900
    return dataset.map(
      lambda example: {**example, "targets": tf.constant(spell), "n\x1b<b>": example["number"]}
    )

  return previewed(task(spoil, TOKENIZE, after=(seqio.preprocessors.append_eos,)), num_examples=2)


@pytest.mark.parametrize("full", [False, True])
def test_text_commands_no_terminal_and_says_what_it_leaves_out(hostile, full):
  text = text_of(hostile, full=full)
  assert all(c.isprintable() or c == "\n" for c in text)
  assert "\\x1b[2J[bold]<script>alert(1)</script>:smile:\\r\\n" in text.replace("\n", "")
  assert not any(line.endswith(" ") or len(line) > 110 for line in text.splitlines())
  assert ("characters …" in text, "more …" in text) == (not full, not full)
  assert "x" * 50 in text
  assert (text.count("x") > 4000) == full
  assert "cached above, at reading below ──" in text


class _Page(html.parser.HTMLParser):
  def __init__(self):
    super().__init__()
    self.open, self.tags, self.text = [], [], []

  def handle_starttag(self, tag, attributes):
    self.tags.append((tag, dict(attributes)))
    if tag != "meta":
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    if "style" not in self.open:
      self.text.append(data)


@pytest.mark.parametrize("full", [False, True])
def test_a_page_needs_nothing_else_and_runs_nothing(hostile, full):
  page = _Page()
  page.feed(preview_page([hostile], full=full))
  assert page.open == []
  assert {tag for tag, _ in page.tags} <= {
    *(
      "html",
      "head",
      "meta",
      "title",
      "style",
      "body",
      "h1",
      "h2",
      "h3",
      "small",
      "p",
      "ol",
      "li",
      "div",
      "b",
    ),
    *("dl", "dt", "dd", "span", "del", "table", "tr", "th", "td"),
  }
  assert not {name for _, attributes in page.tags for name in attributes} & {"src", "href", "onclick"}
  assert "<script>alert(1)</script>" in "".join(page.text)
  assert any(tag == "del" for tag, _ in page.tags)
  titles = [attributes["title"] for tag, attributes in page.tags if tag == "span" and "title" in attributes]
  assert str(small_tasks.VOCABULARY.encode("x")[0]) in titles


def luminance(color):
  """Relative luminance as WCAG 2.1 defines it."""
  parts = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
  red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_stands_on_a_page_can_be_read_by_day_and_by_night(hostile, scheme):
  light, dark = re.findall(r":root \{(.*?)\}", preview_page([hostile]), re.DOTALL)
  colors = dict(re.findall(r"--(\w+): (#\w{6})", {"light": light, "dark": dark}[scheme]))
  for text in ("text", "soft", "bad", "special"):
    for ground in ("page", "shade", "even", "odd"):
      low, high = sorted(luminance(colors[name]) for name in (text, ground))
      assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


def run_main(*arguments):
  assert main(["preview", *arguments]) == 0


@pytest.fixture(scope="module")
def tasks_registered():
  """Tasks of their own, and a mixture of them."""
  plain = task(TOKENIZE, name="preview_plain", after=(seqio.preprocessors.append_eos,))
  random = task(TOKENIZE, small_tasks.rotate, name="preview_random")
  fails = task(raise_at(1), TOKENIZE, name="preview_fails")
  held_out = task(TOKENIZE, name="preview_held_out", sizes={"validation": (9,)})
  with registered(plain, random, fails, held_out):
    mixed = ["preview_random", "preview_plain", "preview_held_out"]
    mixture = seqio.Mixture("preview_mixture", mixed, default_rate=1)
    with registered(mixture):
      yield


def test_json_lines_hold_every_stage_of_a_mixtures_tasks_whole(tasks_registered, capsys):
  run_main("--task=preview_mixture", "--n=2", '--feature_lengths={"targets": 24}', "--format=jsonl")
  found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert list(dict.fromkeys(stage["task"] for stage in found)) == ["preview_plain", "preview_random"]
  plain = [stage for stage in found if stage["task"] == "preview_plain"]
  assert [stage["stage"] for stage in plain] == list(range(6))
  kinds = ["source", "preprocessor", "cache", "preprocessor", "trimmed", "model"]
  assert [stage["kind"] for stage in plain] == kinds
  tokens = plain[3]["examples"][1]["features"]["targets"]
  assert tokens["length"] == len(tokens["ids"]) == 24 + plain[4]["examples"][1]["features"]["targets"]["cut"]
  assert decode_readable(np.array(tokens["ids"]), small_tasks.VOCABULARY) == tokens["text"]


def test_a_mixture_of_caches_shows_its_tasks(tasks_registered, capsys, tmp_path):
  paths = [caches.build(tmp_path, task=f"preview_{name}").directory for name in ("plain", "random")]
  lengths = '--feature_lengths={"targets": 24}'
  run_main(f"--task={paths[0]},1;{paths[1]},2", "--n=1", lengths, "--format=jsonl")
  found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  assert list(dict.fromkeys(stage["task"] for stage in found)) == ["preview_plain", "preview_random"]


@pytest.mark.long
def test_a_preview_is_the_same_again(tasks_registered, capsys):
  outputs = []
  for _ in range(2):
    run_main("--task=preview_random", "--n=1", '--feature_lengths={"targets": 24}')
    outputs.append(capsys.readouterr().out)
  assert outputs[0] == outputs[1]
  run_main("--task=preview_random", "--n=1", '--feature_lengths={"targets": 24}', "--seed=1")
  assert capsys.readouterr().out != outputs[0]


def test_pages_and_pictures_are_written_whole_and_replace_nothing_unasked(tasks_registered, capsys, tmp_path):
  page, picture = tmp_path / "preview.html", tmp_path / "preview.svg"
  arguments = ["--task=preview_plain", "--n=1", f"--html={page}", f"--svg={picture}"]
  run_main(*arguments)
  assert page.read_text().startswith("<!doctype html>")
  assert picture.read_text().startswith("<svg")
  assert "url(http" not in picture.read_text()
  page.write_text("other")
  with pytest.raises(AnystepError) as caught:
    run_main(*arguments)
  assert (caught.value.kind, page.read_text()) == ("output_exists", "other")
  run_main(*arguments, "--overwrite")
  assert page.read_text().startswith("<!doctype html>")


def test_a_program_that_meets_a_failure_shows_what_came_before_and_ends_with_it(
  tasks_registered, capsys, tmp_path
):
  page = tmp_path / "preview.html"
  with pytest.raises(SystemExit) as ended:
    run_program(
      lambda: main(["preview", "--task=preview_fails", '--feature_lengths={"targets": 24}', f"--html={page}"])
    )
  out, err = capsys.readouterr()
  assert ended.value.code == 65
  assert "kind=preprocessor_failed" in err.splitlines()[-1]
  assert "preprocessor=fails" in err.splitlines()[-1]
  assert "raised ValueError: 1 is indigestible" in out
  assert "given: example 1" in out
  assert "1 is indigestible" in page.read_text()


@pytest.mark.parametrize(
  ("arguments", "kind", "fields"),
  [
    ([], "arguments", {"got": "no task"}),
    (["--task=preview_plain", "--n=0"], "arguments", {"got": "--n=0 --skip=0"}),
    (["--task=preview_plain", "--skip=-1"], "arguments", {"got": "--n=3 --skip=-1"}),
    (["--task=preview_plian"], "task_unknown", {"got": "preview_plian"}),
    (
      ["--task=preview_plain", "--split=valid"],
      "split_unknown",
      {"task": "preview_plain", "expected": "validation", "got": "valid"},
    ),
    (
      ["--task=preview_mixture", "--split=test"],
      "split_unknown",
      {"task": "preview_held_out", "got": "test"},
    ),
    (
      ["--task=preview_plain", '--feature_lengths={"target": 3}'],
      "feature_lengths",
      {"expected": "targets", "got": "target"},
    ),
    (
      ["--task=preview_plain", "--feature_lengths={}"],
      "feature_lengths",
      {"task": "preview_plain", "expected": "lengths of targets", "got": ""},
    ),
    (
      ["--task=preview_random"],
      "feature_lengths",
      {
        "task": "preview_random",
        "preprocessor": "random_chunk",
        "expected": "lengths of targets",
        "got": "none",
      },
    ),
    (
      ["--task=preview_plain", "--model=encoder_decoder"],
      "model",
      {
        "task": "preview_plain",
        "expected": "a model for targets",
        "got": "encoder_decoder, which takes inputs",
      },
    ),
    (
      ["--task=preview_plain", "--source=train prat 2"],
      "source",
      {
        "task": "preview_plain",
        "split": "train",
        "expected": "train part 2, train part 3, train part 1, or 0 to 3",
      },
    ),
    (
      ["--task=preview_plain", "--source=4"],
      "source",
      {"task": "preview_plain", "split": "train", "got": "4"},
    ),
    (
      ["--task=preview_plain", "--source=3", "--skip=10"],
      "skip",
      {"task": "preview_plain", "split": "train", "expected": "0 to 9", "got": 10},
    ),
    (
      ["--task=preview_plain", "--source=1"],
      "source_empty",
      {"task": "preview_plain", "split": "train", "expected": "examples", "got": "none in 1 source shards"},
    ),
  ],
)
def test_what_cannot_be_shown_is_refused(tasks_registered, arguments, kind, fields):
  with pytest.raises(AnystepError) as caught:
    run_main(*arguments)
  assert caught.value.kind == kind
  assert caught.value.code == {"source_empty": 66, "feature_lengths": 78}.get(kind, 64)
  assert fields.items() <= caught.value.fields.items()


def test_an_unknown_task_is_told_with_the_names_that_come_near(tasks_registered):
  with pytest.raises(AnystepError) as caught:
    run_main("--task=preview_plian")
  assert "preview_plain" in caught.value.fields["nearest"].split(", ")
  assert "--module_import" in caught.value.fix


def test_wrong_lengths_name_the_flag(tasks_registered):
  with pytest.raises(AnystepError) as caught:
    run_main("--task=preview_random")
  assert "--feature_lengths='{\"" in caught.value.fix


def refused(made):
  def show():
    check_previews([made], split="train")
    previewed(made, feature_lengths=None)

  with pytest.raises(AnystepError) as caught:
    show()
  return caught.value


def with_source(source, *steps, vocabulary=small_tasks.VOCABULARY):
  features = {"targets": seqio.Feature(vocabulary)}
  return seqio.Task("previewed", source=source, preprocessors=steps, output_features=features)


def test_a_source_that_cannot_be_read_is_said_to_be_unreadable(tmp_path):
  missing = refused(with_source(seqio.TextLineDataSource({"train": str(tmp_path / "none.txt")})))
  assert (missing.code, missing.kind, missing.fields["task"]) == (66, "source_unreadable", "previewed")
  assert "none.txt" in missing.fields["got"]
  nothing = refused(with_source(seqio.TextLineDataSource({"train": str(tmp_path / "*.txt")})))
  assert (nothing.code, nothing.kind) in {(66, "source_unreadable"), (66, "source_empty")}


def test_preprocessors_that_seqio_refuses_are_refused():
  from anystep.tasks.preprocessors import random_chunk

  error = refused(with_source(small_tasks.NumberedTexts(), random_chunk, seqio.CacheDatasetPlaceholder()))
  assert (error.code, error.kind, error.fields["task"]) == (78, "preprocessors_refused", "previewed")
  assert "sequence_length" in error.fields["got"]


def test_a_vocabulary_that_cannot_be_read_is_missed_before_work_starts(tmp_path):
  vocabulary = seqio.SentencePieceVocabulary(str(tmp_path / "none.model"))
  error = refused(with_source(small_tasks.NumberedTexts(), TOKENIZE, vocabulary=vocabulary))
  assert (error.code, error.kind) == (66, "vocabulary_missing")
  assert "none.model" in str(error)
