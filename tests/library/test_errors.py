"""A foreseen failure is one line that a person can act on and a program can read."""

import copy
import json
import pickle
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anystep.errors import AnystepError, ExitCode, find_nearest

FIELD = re.compile(r' ([a-z_]+)=("(?:[^"\\]|\\.)*"|[^\s"]+)')


def fields_of(line):
  """What a program reads in an error's line."""
  assert line.startswith("ERROR ")
  found = FIELD.findall(line)
  assert "ERROR" + "".join(f" {name}={value}" for name, value in found) == line
  return {name: json.loads(value) if value.startswith('"') else value for name, value in found}


def test_codes_are_the_designs():
  assert {code.name: int(code) for code in ExitCode} == {
    "USAGE": 64,
    "DATA": 65,
    "NO_INPUT": 66,
    "NUMERICS": 70,
    "CANNOT_CREATE": 73,
    "IO": 74,
    "PREEMPTED": 75,
    "MISMATCH": 76,
    "UNSAFE": 77,
    "CONFIG": 78,
  }


VALUES = st.text() | st.integers() | st.none() | st.lists(st.text(max_size=3), max_size=3)


@given(st.text(), st.dictionaries(st.sampled_from(["path", "expected", "got", "task"]), VALUES))
@settings(deadline=None, max_examples=150, derandomize=True)
def test_its_text_is_one_line_that_gives_everything_back(fix, fields):
  error = AnystepError(ExitCode.DATA, "shard_corrupt", fix=fix, **fields)
  line = str(error)
  assert "\n" not in line
  assert "\r" not in line
  shown = {name: str(value) for name, value in fields.items()}
  assert fields_of(line) == {"code": "65", "kind": "shard_corrupt", **shown, "fix": fix}
  assert list(fields_of(line)) == ["code", "kind", *fields, "fix"]


def test_it_keeps_what_it_was_told():
  error = AnystepError(ExitCode.CONFIG, "lanes", fix="change lanes", expected=[1, 2], got=3)
  assert (error.code, error.kind, error.fix) == (78, "lanes", "change lanes")
  assert error.fields == {"expected": [1, 2], "got": 3}


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_it_comes_whole_out_of_another_process(again):
  error = AnystepError(ExitCode.DATA, "shard_corrupt", fix="restore it", path="a b", expected=2)
  assert str(again(error)) == str(error)
  assert again(error).fields == error.fields


NAMES = ["c4", "stdlib_lm", "stdlib_span_corruption", "wmt_en_de", "wmt_en_fr"]


@pytest.mark.parametrize(
  ("name", "suggested"),
  [
    ("stdlib_ml", "stdlib_lm"),
    ("wmt_en_ro", "wmt_en_fr, wmt_en_de"),
    ("xxxxxxxx", "c4, stdlib_lm, stdlib_span_corruption"),
    ("", "c4, stdlib_lm, stdlib_span_corruption"),
  ],
)
def test_a_mistyped_name_gets_the_nearest_or_else_the_first(name, suggested):
  assert find_nearest(name, reversed(NAMES)) == suggested


def test_suggestions_are_as_few_as_asked_for():
  assert find_nearest("wmt_en_ro", NAMES, limit=1) == "wmt_en_fr"
  assert find_nearest("anything", []) == ""
