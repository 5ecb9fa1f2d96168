"""Names become paths only where they stay inside the cache's root."""

import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anystep.errors import AnystepError
from anystep.files import names

NO_NAMES = [
  "", ".", "..", "../x", "a/b", "/etc", "a\\b", "~", "a b", " a", "a ", "a\n", "a\0", "-rf", ".hidden", "ä",
  "a*", "$HOME", "gs://b",
]  # fmt: skip
NAMES_OF_SPLITS = [
  names.manifest_name,
  names.info_name,
  names.stats_name,
  lambda split: names.records_name(split, "array_record", 0, 1),
  lambda split: names.lengths_name(split, 0, 1),
  lambda split: names.offsets_name(split, 0, 1),
  names.shard_pattern,
]


@pytest.mark.parametrize(
  ("task", "directory"),
  [
    ("demo", "root/demo"),
    ("wmt:en_de", "root/wmt/en_de"),
    ("a:b:c", "root/a/b/c"),
    ("c4_v220-x.y", "root/c4_v220-x.y"),
    ("_1", "root/_1"),
  ],
)
def test_a_task_has_a_directory_below_the_root(task, directory):
  assert str(names.task_directory("root", task)) == directory


@pytest.mark.parametrize("task", [*NO_NAMES, *(f"a:{name}" for name in NO_NAMES), ":", "a:", ":a", "a::b"])
def test_a_task_that_is_a_path_is_refused(task):
  with pytest.raises(AnystepError) as refused:
    names.task_directory("root", task)
  assert (refused.value.code, refused.value.kind) == (77, "task_name")
  assert refused.value.fields["expected"]
  assert refused.value.fields["got"] in {repr(part) for part in task.split(":")}


@pytest.mark.parametrize("split", [*NO_NAMES, "train:x", None, 3])
@pytest.mark.parametrize("name_of", NAMES_OF_SPLITS)
def test_a_split_that_is_a_path_is_refused(name_of, split):
  with pytest.raises(AnystepError) as refused:
    name_of(split)
  assert (refused.value.code, refused.value.kind) == (77, "split_name")
  assert refused.value.fields["got"] == repr(split)


@given(st.text(alphabet="ab./:\\-~ \n\0", max_size=8))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_no_name_leads_out_of_the_root(name):
  try:
    directory = pathlib.PurePosixPath(str(names.task_directory("/root", name)))
  except AnystepError:
    return
  assert directory.parts[: 2 + name.count(":")][:2] == ("/", "root")
  assert directory.parts[2:] == tuple(name.split(":"))
  assert not {".", ".."} & set(directory.parts)


@pytest.mark.parametrize("name", ["a", "corpus/a", "corpus/c4-train.tfrecord-00000-of-01024", "_/b.c/d-e"])
def test_a_file_has_a_path_below_the_root(name):
  assert str(names.record_path("/root", name)) == f"/root/{name}"
  assert names.check_record_name(name) == name


@pytest.mark.parametrize(
  "name",
  [
    *(name for name in NO_NAMES if name != "a/b"),
    *(f"corpus/{name}" for name in NO_NAMES if name != "a/b"),
    *(f"{name}/file" for name in NO_NAMES if name != "a/b"),
    None,
    3,
    b"corpus",
  ],
)
def test_a_file_that_could_lie_elsewhere_is_refused(name):
  for action in (lambda: names.record_path("/root", name), lambda: names.check_record_name(name)):
    with pytest.raises(AnystepError) as refused:
      action()
    assert (refused.value.code, refused.value.kind) == (77, "file_name")
    assert "'/'" in refused.value.fields["expected"]
    assert refused.value.fields["got"] == repr(name)


@given(st.text(alphabet="ab./:\\-~ \n\0", max_size=8))
@settings(deadline=None, max_examples=300, derandomize=True)
def test_no_file_leads_out_of_the_root(name):
  try:
    path = pathlib.PurePosixPath(str(names.record_path("/root", name)))
  except AnystepError:
    return
  assert path.parts == ("/", "root", *name.split("/"))
  assert not {"", ".", ".."} & set(path.parts)


@pytest.mark.parametrize("name", ["", "0" * 63, "0" * 65, "G" * 64, "A" * 64, f"../{'0' * 61}", 7, None])
def test_a_vocabularys_copy_has_a_sha256_for_a_name(name):
  sha256 = "0123456789abcdef" * 4
  assert names.vocabulary_path("/cache/t", sha256).as_posix() == f"/cache/t/vocabularies/{sha256}"
  with pytest.raises(AnystepError) as failure:
    names.vocabulary_path("/cache/t", name)
  assert (failure.value.code, failure.value.kind) == (77, "vocabulary_name")
  assert failure.value.fields == {"expected": "a sha256, 64 hexadecimal digits", "got": repr(name)}


def test_files_have_seqios_names():
  assert names.manifest_name("train") == "manifest.train.json"
  assert names.info_name("train") == "info.train.json"
  assert names.stats_name("train") == "stats.train.json"
  assert names.records_name("train", "array_record", 3, 64) == "train.array_record-00003-of-00064"
  assert names.records_name("test", "tfrecord", 0, 1) == "test.tfrecord-00000-of-00001"
  assert names.lengths_name("train", 3, 64) == "train.lengths-00003-of-00064.npy"
  assert names.offsets_name("train", 3, 64) == "train.tfrecord-00003-of-00064-offsets.npy"
  assert names.COMPLETED == "COMPLETED"


@pytest.mark.parametrize(
  "name",
  [
    names.records_name("train", "array_record", 3, 64),
    names.records_name("train", "tfrecord", 123_456, 200_000),
    names.lengths_name("train", 0, 1),
    names.offsets_name("train", 0, 1),
  ],
)
def test_whatever_could_be_a_shard_is_recognised(name):
  assert names.shard_pattern("train").match(name)


@pytest.mark.parametrize(
  "name",
  [
    names.records_name("train2", "array_record", 3, 64),
    names.records_name("pretrain", "array_record", 3, 64),
    "trainXarray_record-00000-of-00001",
    "train.array_record-00000-of-00001.tmp",
    "train.array_record",
    names.manifest_name("train"),
    names.COMPLETED,
  ],
)
def test_nothing_else_is_taken_for_a_shard(name):
  assert not names.shard_pattern("train").match(name)


def test_a_splits_dots_stand_for_themselves():
  assert names.shard_pattern("a.b").match("a.b.array_record-00000-of-00001")
  assert not names.shard_pattern("a.b").match("aXb.array_record-00000-of-00001")
