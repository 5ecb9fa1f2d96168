"""SeqIO's private parts: their version, what is relied on, and that one module alone names them."""

import ast
import dataclasses
import inspect
import pathlib
import re

import pytest
import seqio
import tensorflow as tf

from anystep.tasks import seqio_internals

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = ("anystep", "tasks", "cache_job", "train", "benchmarks")
MODULE = pathlib.Path(seqio_internals.__file__).resolve()
MODEL = pathlib.Path(seqio.__file__).parent / "test_data" / "sentencepiece" / "sentencepiece.model"
VOCABULARY = seqio.ByteVocabulary()


def private_names(path):
  """Attributes of anything but `self` and `cls`, and texts for `getattr`, that begin with an underscore."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
      name = node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
      name = node.value
    else:
      continue
    if name.startswith("_") and not name.startswith("__") and name.isidentifier():
      yield name


def rooted_in_seqio(path):
  """Attributes of `seqio` and of its modules, as they are written."""
  nodes = ast.walk(ast.parse(path.read_text()))
  texts = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
  return {text for text in texts if re.match(r"seqio\.(.*\.)?_[a-zA-Z]", text)}


def test_the_private_parts_are_of_the_version_that_is_known():
  assert seqio.__version__ == "0.0.20"


def test_no_other_module_names_them():
  private = {name for name in private_names(MODULE) if not hasattr(seqio_internals, name)}
  assert len(private) >= 10
  others = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
  found = {
    path.relative_to(ROOT): names
    for path in others
    if path.resolve() != MODULE and (names := {*rooted_in_seqio(path), *(private & {*private_names(path)})})
  }
  assert not found


def test_models_are_loaded_by_a_name_that_is_looked_up_when_one_is_read():
  parameters = [*inspect.signature(seqio_internals.load_sentencepiece_model).parameters]
  assert parameters[:2] == ["sentencepiece_model_file", "extra_ids"]
  model_context = seqio.SentencePieceVocabulary._model_context
  assert "_load_model" in model_context.__code__.co_names
  assert "self._sentencepiece_model_file" in inspect.getsource(model_context)


def test_a_vocabulary_names_its_file_and_a_copy_names_another(tmp_path):
  vocabulary = seqio.SentencePieceVocabulary(str(MODEL), extra_ids=3)
  assert seqio_internals.model_file(vocabulary) == str(MODEL)
  renamed = seqio_internals.with_model_file(vocabulary, "other.model")
  assert [seqio_internals.model_file(either) for either in (vocabulary, renamed)] == [
    str(MODEL),
    "other.model",
  ]
  words = tmp_path / "words.txt"
  words.write_text("[UNK]\n")
  assert seqio_internals.model_file(seqio.BertWordPieceVocabulary(str(words))) == str(words)
  assert seqio_internals.model_file(VOCABULARY) is None


def test_a_task_keeps_what_it_was_made_with():
  def metric(targets, predictions):
    return {}

  arguments = {
    "preprocessors": [seqio.CacheDatasetPlaceholder(), seqio.preprocessors.append_eos],
    "metric_fns": [metric],
    "metric_objs": [],
  }
  source = seqio.FunctionDataSource(lambda split, shuffle_files: None, splits=["train"])
  features = {"targets": seqio.Feature(VOCABULARY)}
  task = seqio.Task("internals", source=source, output_features=features, **arguments)
  assert seqio_internals.task_arguments(task) == arguments
  assert {*arguments} <= {*inspect.signature(seqio.Task).parameters}
  with pytest.raises(ValueError, match="targets"):
    seqio_internals.validate_preprocessing(
      task, tf.data.Dataset.range(1).map(lambda number: {"other": number})
    )


def test_sources_keep_what_they_read_with(tmp_path):
  def datasets(split, shuffle_files):
    return None

  assert seqio_internals.dataset_function(seqio.FunctionDataSource(datasets, splits=["train"])) is datasets
  source = seqio.TextLineDataSource({"train": "lines.txt"})
  assert seqio_internals.file_reader(source) is not None
  (tmp_path / "info.train.json").write_text('{"num_shards": 3, "features": {}}')
  (tmp_path / "stats.train.json").write_text('{"examples": 3}')
  assert list(seqio_internals.cached_source(str(tmp_path), "train").splits) == ["train"]


@pytest.mark.parametrize("flag", [False, True])
def test_converters_keep_what_they_were_made_with(flag):
  converter = seqio.DecoderFeatureConverter(pack=flag, loss_on_targets_only=flag)
  assert seqio_internals.packs(converter) == flag
  assert seqio_internals.loss_on_targets_only(converter) == flag
  converter = seqio.DecoderFeatureConverter(pack=False, passthrough_features={"more": None} if flag else None)
  assert seqio_internals.passes_features_through(converter) == flag


def test_the_next_seed_is_that_of_the_map_seed_manager():
  with seqio.utils.map_seed_manager(17):
    assert seqio_internals.next_map_seed() == 17


def test_a_random_map_is_made_of_what_replaces_its_call():
  fields = [field.name for field in dataclasses.fields(seqio.utils._GrainRandomMapFn)]
  assert fields == ["map_fn", "num_seeds", "num_parallel_calls", "sequence_length", "output_features"]


@pytest.mark.parametrize("num_seeds", [1, 2])
def test_random_maps_take_their_seeds_in_the_body_alone(num_seeds):
  @seqio.map_over_dataset(num_seeds=num_seeds)
  def draw(example, **seeds):
    (drawn,) = seeds.values()
    return {**example, "drawn": tf.stack(drawn)}

  def take_seeds(count):
    pairs = tf.reshape(tf.range(4 * count, dtype=tf.int64), (2, count, 2))
    return tf.data.Dataset.from_tensor_slices(tuple(pairs[:, place] for place in range(count)))

  dataset = tf.data.Dataset.range(2).map(lambda number: {"number": number})
  before = seqio.utils._GrainRandomMapFn.__call__
  with pytest.raises(ZeroDivisionError), seqio_internals.seeds_of_random_maps(take_seeds):
    raise ZeroDivisionError
  with seqio_internals.seeds_of_random_maps(take_seeds):
    rows = [row["drawn"].reshape(-1).tolist() for row in draw(dataset).as_numpy_iterator()]
  assert rows == [[*range(2 * num_seeds)], [*range(2 * num_seeds, 4 * num_seeds)]]
  assert seqio.utils._GrainRandomMapFn.__call__ is before
