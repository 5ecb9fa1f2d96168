"""What the job refuses, each under a kind of its own, with the cache that was there before left readable."""

import shutil
import sys

import pytest
import seqio
import tensorflow as tf
from job_runs import registered, run_job, stamps_of

from anystep.cache_job.main import run
from anystep.cache_job.preprocessing import example_batches, example_checks
from anystep.caches.cache import open_cache
from anystep.errors import AnystepError

NAME = "small_refused"
TEXT = seqio.Feature(seqio.PassThroughVocabulary(1), add_eos=False, dtype=tf.string, rank=0)
PLACEHOLDER = seqio.CacheDatasetPlaceholder()


class Numbers(seqio.DataSource):
  """Numbers, in shards that each have a dataset of their own."""

  def __init__(self, *shards):
    self._shards = shards
    super().__init__(splits=("train",))

  @property
  def supports_arbitrary_sharding(self):
    return False

  def list_shards(self, split):
    return [f"part {k}" for k in range(len(self._shards))]

  def get_dataset(self, split="train", shuffle=False, seed=None, shard_info=None, num_epochs=1):
    return self._shards[shard_info.index]()


def numbers(*values, name="number", dtype=tf.int64):
  return lambda: tf.data.Dataset.from_tensor_slices({name: tf.constant(values, dtype, [len(values)])})


def task(*steps, source=None, name=NAME, placeholder=(PLACEHOLDER,), **output_features):
  return seqio.Task(
    name,
    source=source or Numbers(numbers(0, 1, 2), numbers(3, 4)),
    preprocessors=[*steps, *placeholder],
    output_features=output_features,
  )


def cut_short(path):
  """A TFRecord file of three records, without its last byte."""
  with tf.io.TFRecordWriter(str(path)) as writer:
    for number in range(3):
      writer.write(str(number))
  path.write_bytes(path.read_bytes()[:-1])
  return Numbers(numbers(0), lambda: tf.data.TFRecordDataset(str(path)).map(as_number))


def as_number(text):
  return {"number": tf.strings.to_number(text, tf.int64)}


def raise_for_ever():
  """A dataset that comes to no end: each of its elements raises."""

  def broken(_):
    raise OSError("the disk is gone")

  return tf.data.Dataset.range(1 << 40).map(
    lambda k: {"number": tf.ensure_shape(tf.py_function(broken, [k], tf.int64), [])}
  )


def generate_and_raise():
  def generate():
    yield {"number": 1}
    raise RuntimeError("no more of it")

  return tf.data.Dataset.from_generator(generate, output_signature={"number": tf.TensorSpec([], tf.int64)})


def raise_when_built():
  raise FileNotFoundError("no such corpus")


def drop_all(dataset):
  return dataset.filter(lambda example: example["number"] < 0)


def cut_texts(dataset):
  return dataset.map(lambda example: {"text": tf.where(example["number"] == 4, b"\xe2\x82", "€")})


def with_copies(dataset):
  return dataset.map(
    lambda example: {
      "inputs": [example["number"]],
      "inputs_pretokenized": tf.where(example["number"] == 1, b"\xff", ""),
    }
  )


def long_texts(dataset):
  return dataset.map(lambda example: {"text": tf.strings.join(["x"] * 200)})


def thirds(dataset):
  return dataset.map(lambda example: {"ratio": tf.cast(example["number"], tf.float64) / 3})


def complex_numbers(dataset):
  return dataset.map(lambda example: {"wave": tf.cast(example["number"], tf.complex64)})


def nest(dataset):
  return dataset.map(lambda example: {"inner": example})


def bare(dataset):
  return dataset.map(lambda example: example["number"])


def break_graph(dataset):
  return dataset.map(lambda example: {"number": example["no_such_feature"]})


def cut(dataset, sequence_length):
  return dataset.take(sequence_length["number"])


END = "--cache_at=end"
BORNE = "--max_bad_examples=2"
CASES = {
  "a split that preprocessors empty": (
    task(drop_all), (), 66, "split_empty", {"got": "none of 2 source shards"}
  ),
  "a split without examples": (
    task(source=Numbers(numbers(), numbers())), (), 66, "split_empty", {"got": "none of 2 source shards"}
  ),
  "no source shard": (task(source=Numbers()), (), 66, "source_empty", {}),
  "a source that cannot be opened": (
    task(source=Numbers(numbers(1), raise_when_built)), (), 66, "source_unreadable",
    {"source_shard": "part 1", "got": "FileNotFoundError: no such corpus"},
  ),
  "a source that cannot be counted": (
    task(source=Numbers(raise_when_built)), ("--range_examples=2",), 66, "source_unreadable",
    {"source_shard": "part 0", "got": "FileNotFoundError: no such corpus"},
  ),
  "a generator that raises": (
    task(drop_all, source=Numbers(generate_and_raise)), (BORNE,), 66, "source_unreadable",
    {"source_shard": "part 0", "place": "0"},
  ),
  "a source that raises for ever": (
    task(source=Numbers(raise_for_ever)), (BORNE,), 66, "source_unreadable",
    {"source_shard": "part 0", "place": "0", "got": "UnknownError: OSError: the disk is gone"},
  ),
  "text that is not UTF-8": (
    task(cut_texts, text=TEXT), (), 65, "text_not_utf8",
    {"source_shard": "part 1", "place": "1", "preprocessor": "cut_texts", "feature": "text",
     "got": r"b'\xe2\x82'"},
  ),
  "text beside its tokens that is not UTF-8": (
    task(with_copies), (), 65, "text_not_utf8",
    {"source_shard": "part 0", "place": "1", "preprocessor": "with_copies", "feature": "inputs_pretokenized"},
  ),
  "text of the source that is not UTF-8": (
    task(source=Numbers(numbers(b"a", b"\xff", name="text", dtype=tf.string)), text=TEXT), (), 65,
    "text_not_utf8", {"source_shard": "part 0", "place": "1", "preprocessor": "the source"},
  ),
  "a record that is too large": (
    task(long_texts), (), 65, "record_too_large",
    {"source_shard": "part 0", "place": "0", "preprocessor": "long_texts", "expected": "at most 100 bytes"},
  ),
  "a float64 that float32 does not hold": (
    task(thirds), (), 65, "float64_inexact",
    {"source_shard": "part 0", "place": "1", "preprocessor": "thirds", "feature": "ratio",
     "got": "0.3333333333333333"},
  ),
  "a preprocessor that cannot be built": (
    task(break_graph), (), 65, "preprocessor_failed",
    {"source_shard": "part 0", "preprocessor": "break_graph"},
  ),
  "features that one source shard lacks": (
    task(source=Numbers(numbers(0), numbers(1, name="other"))), (BORNE,), 65, "feature_form_varies",
    {"source_shard": "part 1", "feature": "number"},
  ),
  "another dtype in one source shard": (
    task(source=Numbers(numbers(0), numbers(), numbers(1, dtype=tf.int32))), (BORNE,), 65,
    "feature_form_varies", {"source_shard": "part 2", "feature": "number"},
  ),
  "examples that are not the task's output": (
    task(text=TEXT),
    (),
    78,
    "output_feature",
    {"feature": "text", "expected": "string of rank 0", "got": "none"},
  ),
  "complex numbers": (task(complex_numbers), (), 78, "feature_form", {"feature": "wave"}),
  "features within features": (task(nest), (), 78, "feature_form", {"feature": "inner"}),
  "examples that are bare tensors": (task(bare), (), 78, "feature_form", {"feature": ""}),
  "a task without a placeholder": (task(placeholder=()), (), 78, "placeholder_missing", {"task": NAME}),
  "a preprocessor that takes lengths, before the placeholder": (
    task(cut),
    (),
    78,
    "preprocessors_refused",
    {},
  ),
  "a preprocessor that takes lengths, after the placeholder": (
    task(PLACEHOLDER, cut, placeholder=()), (END,), 64, "task_feature_lengths", {"preprocessor": "cut"}
  ),
}  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  root = tmp_path_factory.mktemp("before")
  with registered(task()):
    run_job(root, tasks=NAME)
  return root


@pytest.fixture
def root(built, tmp_path):
  """A root with the cache of what the task was, which must stay as it is."""
  root = tmp_path / "root"
  shutil.copytree(built, root)
  before = stamps_of(root)
  yield root
  after = stamps_of(root)
  made_by_files = {path: stamp for path, stamp in before.items() if path.is_file()}
  assert {path: after.get(path) for path in made_by_files} == made_by_files
  open_cache(root, NAME, "train").verify()


def refusal(root, refused, *flags):
  with registered(refused), pytest.raises(AnystepError) as caught:
    run_job(root, "--overwrite", *flags, tasks=refused.name)
  assert caught.value.fix
  return caught.value


# Of a kind that another case has too.
LONGER = {
  "a split without examples",
  "a source that cannot be counted",
  "a generator that raises",
  "text beside its tokens that is not UTF-8",
  "another dtype in one source shard",
  "features within features",
  "examples that are bare tensors",
}


@pytest.mark.parametrize(
  ("refused", "flags", "code", "kind", "fields"),
  [pytest.param(*case, id=name, marks=[pytest.mark.long] * (name in LONGER)) for name, case in CASES.items()],
)
def test_the_job_refuses(root, monkeypatch, refused, flags, code, kind, fields):
  if kind == "record_too_large":
    for module in (example_checks, example_batches):
      monkeypatch.setattr(module, "MAX_RECORD_BYTES", 100)
  error = refusal(root, refused, *flags)
  assert (error.code, error.kind) == (code, kind)
  assert {name: str(error.fields[name]) for name in fields} == fields
  assert error.fields["task"] == NAME


@pytest.mark.parametrize(
  "flags", [pytest.param((), marks=pytest.mark.long), (BORNE,), ("--range_examples=2",)]
)
def test_the_job_refuses_a_source_file_that_is_cut_short(root, tmp_path, flags):
  error = refusal(root, task(source=cut_short(tmp_path / "cut.tfrecord")), *flags)
  assert (error.code, error.kind, error.fields["source_shard"]) == (66, "source_unreadable", "part 1")
  assert "DataLossError" in error.fields["got"]
  assert error.fields.get("place") in ("2", None)


def test_a_task_without_a_placeholder_is_cached_whole_where_that_is_asked_for(tmp_path):
  with registered(task(placeholder=())):
    run_job(tmp_path, END, tasks=NAME)
  assert len(open_cache(tmp_path, NAME, "train")) == 5


@pytest.mark.parametrize("name", ["..:..:x", "small_refused:..", ".x"])
def test_the_job_refuses_names_that_lead_out_of_the_root(tmp_path, name):
  root = tmp_path / "a" / "b" / "root"
  error = refusal(root, task(name=name))
  assert (error.code, error.kind) == (77, "task_name")
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
  "place", ["the root", "the task's directory", "the directory of what is not finished"]
)
def test_the_program_calls_a_directory_that_cannot_be_made_what_it_is(
  root, tmp_path, monkeypatch, capsys, place
):
  path = {
    "the root": tmp_path / "file",
    "the task's directory": root / "small_other",
    "the directory of what is not finished": root / NAME / ".building",
  }[place]
  path.write_text("a file in a directory's place")
  name = "small_other" if place == "the task's directory" else NAME
  cache_dir = path if place == "the root" else root
  flags = [f"--tasks={name}", f"--output_cache_dir={cache_dir}", "--overwrite"]
  monkeypatch.setattr(sys, "argv", ["anystep-cache", *flags])
  with registered(task(name=name)), pytest.raises(SystemExit) as caught:
    run()
  assert caught.value.code == 73
  line = capsys.readouterr().err.splitlines()[-1]
  assert line.startswith(f"ERROR code=73 kind=cannot_create path={path}")
  path.unlink()
