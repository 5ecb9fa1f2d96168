"""Tokenizers of the Hugging Face hub as SeqIO's vocabularies, against the tokenizers library itself."""

import copy
import hashlib
import json
import pickle
import sys

import numpy as np
import pytest
import seqio
import tensorflow as tf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from anystep.errors import AnystepError
from anystep.tasks.vocabularies.hugging_face import HuggingFaceVocabulary
from anystep.transforms.identity import describe

TEXTS = ["the quick brown fox", "wörter, 中文 and emoji 🙂", "", " two  spaces\nand a line ", "a</s>b"]


def trained(special, **changes):
  """A byte-level tokenizer with these special tokens first, as JSON."""
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(
    vocab_size=len(alphabet) + len(special) + 20,
    special_tokens=special,
    initial_alphabet=alphabet,
    show_progress=False,
  )
  tokenizer.train_from_iterator(TEXTS * 5 + ["the quicker the fox the browner"] * 9, trainer)
  tokenizer.add_tokens(changes.pop("added", []))
  if "</s>" in special:
    # What adds an end token by itself, cuts and fills: nothing of which a vocabulary may do.
    tokenizer.post_processor = processors.TemplateProcessing(
      single="$A </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
  document = json.loads(tokenizer.to_str())
  document["model"].update(changes)
  return json.dumps(document)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """Tokenizers' files by where their padding is."""
  folder = tmp_path_factory.mktemp("tokenizers")
  sentinels = [AddedToken(f"<extra_id_{k}>", normalized=False) for k in (3, 2, 1, 0)]
  contents = {
    "first": trained(["<pad>", "</s>", "<unk>"]),
    "second": trained(["<s>", "<pad>", "</s>", "<unk>"]),
    "none": trained(["<|end|>"]),
    "sentinels": trained(["<pad>", "</s>", "<unk>"], added=sentinels),
    "random": trained(["<pad>", "</s>", "<unk>"], dropout=0.1),
    "other": trained(["<pad>", "</s>", "<unk>", "<sep>"]),
    "broken": "{}",
  }
  for name, content in contents.items():
    (folder / f"{name}.json").write_text(content)
  return {name: folder / f"{name}.json" for name in contents}


CASES = {
  "first": {"bos": None},
  "second": {"bos": "<s>"},
  "none": {"pad": None, "eos": "<|end|>", "unk": None},
}


@pytest.fixture(params=CASES)
def case(request, files):
  """A vocabulary and the tokenizer itself, which neither cuts nor fills."""
  tokenizer = Tokenizer.from_file(str(files[request.param]))
  tokenizer.no_truncation()
  tokenizer.no_padding()
  return HuggingFaceVocabulary(files[request.param], **CASES[request.param]), tokenizer


def expected_ids(vocabulary, tokenizer, text):
  """The tokenizer's ids where its padding token has changed places with id 0, or where all moved up."""
  ids = tokenizer.encode(text, add_special_tokens=False).ids
  pad = vocabulary.special_tokens["pad"]
  if pad is None:
    return [token + 1 for token in ids]
  pad_id = tokenizer.token_to_id(pad)
  return [{pad_id: 0, 0: pad_id}.get(token, token) for token in ids]


def test_a_text_has_the_tokenizers_ids_with_0_for_padding(case):
  vocabulary, tokenizer = case
  assert vocabulary.pad_id == 0
  for text in TEXTS:
    ids = expected_ids(vocabulary, tokenizer, text)
    assert vocabulary.encode(text) == ids
    assert vocabulary.encode_tf(tf.constant(text)).numpy().tolist() == ids
  assert all(len(vocabulary.encode(text)) > 3 for text in TEXTS[:2])


def test_a_batch_is_its_texts_one_by_one(case):
  vocabulary, tokenizer = case
  expected = [expected_ids(vocabulary, tokenizer, text) for text in TEXTS]
  assert [row.tolist() for row in vocabulary.encode_batch(TEXTS)] == expected
  assert vocabulary.encode_tf(tf.constant(TEXTS)).to_list() == expected
  nested = vocabulary.encode_tf(tf.constant([TEXTS[:2], TEXTS[2:4]]))
  assert nested.to_list() == [expected[:2], expected[2:4]]
  ragged = vocabulary.encode_tf(tf.ragged.constant([TEXTS[:1], [], TEXTS[1:]]))
  assert ragged.to_list() == [expected[:1], [], expected[1:]]
  assert vocabulary.encode_tf(tf.constant([], tf.string)).to_list() == []


def test_ids_read_as_their_text_up_to_the_end_token(case):
  vocabulary, _ = case
  for text in TEXTS[:4]:
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    assert vocabulary.decode(np.array([*ids, vocabulary.eos_id, *ids, 0])) == text
    assert vocabulary.decode_tf(tf.constant([*ids, 0, 0], tf.int32)).numpy().decode() == text
  rows = vocabulary.encode_tf(tf.constant(TEXTS[:4])).to_tensor()
  assert [text.decode() for text in vocabulary.decode_tf(rows).numpy()] == TEXTS[:4]


def test_special_ids_are_those_of_the_tokens_that_were_named(case):
  vocabulary, tokenizer = case
  found = {"eos": vocabulary.eos_id, "unk": vocabulary.unk_id, "bos": vocabulary.bos_id, "pad": 0}
  for name, token in vocabulary.special_tokens.items():
    if token is None:
      assert name == "pad" or found[name] is None
    else:
      assert vocabulary.tokenizer_ids[found[name]] == tokenizer.token_to_id(token)
  assert vocabulary.vocab_size == len(vocabulary.tokenizer_ids)
  named = vocabulary.tokenizer_ids[vocabulary.tokenizer_ids >= 0]
  assert sorted(named) == list(range(tokenizer.get_vocab_size()))


@pytest.mark.parametrize(("name", "added"), [("first", 4), ("none", 4), ("sentinels", 0)])
def test_sentinels_are_the_last_ids_the_first_the_very_last(files, name, added):
  plain, vocabulary = (HuggingFaceVocabulary(files[name], extra_ids=k, **CASES.get(name, {})) for k in (0, 4))
  size = vocabulary.vocab_size
  assert size == plain.vocab_size + added
  assert vocabulary.extra_ids == 4
  text = "fox <extra_id_0> the <extra_id_3>"
  ids = vocabulary.encode(text)
  assert [token for token in ids if token >= size - 4] == [size - 1, size - 4]
  assert vocabulary.decode(ids) == text
  if added:
    assert vocabulary.encode(TEXTS[0]) == plain.encode(TEXTS[0])


class TestIsTheSame:
  def test_where_the_files_bytes_are(self, files, tmp_path):
    copied = tmp_path / "copy.json"
    copied.write_bytes(files["first"].read_bytes())
    original, same = HuggingFaceVocabulary(files["first"]), HuggingFaceVocabulary(copied)
    assert original == same
    assert describe(original) == describe(same)
    assert describe(original)["content_sha256"] == hashlib.sha256(copied.read_bytes()).hexdigest()
    assert str(tmp_path) not in json.dumps(describe(same))

  @pytest.mark.parametrize(
    "other",
    [
      ("other", {}),
      ("first", {"extra_ids": 4}),
      ("first", {"unk": None}),
      ("first", {"pad": None}),
      ("first", {"bos": "<unk>"}),
    ],
  )
  def test_and_another_where_bytes_special_tokens_or_sentinels_differ(self, files, other):
    name, changes = other
    one, two = HuggingFaceVocabulary(files["first"]), HuggingFaceVocabulary(files[name], **changes)
    assert one != two
    assert describe(one) != describe(two)

  def test_in_another_process_and_as_a_copy_for_gin(self, files):
    vocabulary = HuggingFaceVocabulary(files["second"], extra_ids=4, bos="<s>")
    expected = vocabulary.encode(TEXTS[1])
    for copied in (pickle.loads(pickle.dumps(vocabulary)), copy.deepcopy(vocabulary)):
      assert copied == vocabulary
      assert copied.encode(TEXTS[1]) == expected
    assert len(pickle.dumps(vocabulary)) < 1000

  def test_and_is_no_vocabulary_of_another_kind(self, files):
    assert HuggingFaceVocabulary(files["first"]) != seqio.ByteVocabulary()


def test_seqio_tokenizes_with_it_in_many_threads(files):
  vocabulary = HuggingFaceVocabulary(files["first"])
  texts = [f"{text} {k}" for k in range(40) for text in TEXTS]
  features = {"targets": seqio.Feature(vocabulary)}
  dataset = seqio.preprocessors.tokenize(
    tf.data.Dataset.from_tensor_slices({"targets": texts}), output_features=features
  )
  assert dataset.element_spec["targets"] == tf.TensorSpec([None], tf.int32)
  found = [example["targets"].tolist() for example in dataset.as_numpy_iterator()]
  assert found == [vocabulary.encode(text) for text in texts]


@pytest.mark.parametrize(
  ("name", "changes", "kind", "fields"),
  [
    ("first", {"eos": "</S>"}, "special_token", {"got": "eos='</S>'", "expected": "</s>"}),
    ("none", {}, "special_token", {"got": "eos='</s>'", "expected": "<|end|>"}),
    ("none", {"eos": None}, "special_token", {"got": "pad='<pad>'"}),
    ("sentinels", {"extra_ids": 2}, None, {}),
    ("sentinels", {"extra_ids": 6}, "sentinels", {"expected": "<extra_id_5> to <extra_id_0>"}),
    ("random", {}, "tokenizer_random", {"got": "dropout=0.1"}),
    ("broken", {}, "vocabulary_invalid", {"expected": "tokenizer.json"}),
  ],
)
def test_what_is_not_there_is_refused_when_the_file_is_first_needed(files, name, changes, kind, fields):
  vocabulary = HuggingFaceVocabulary(files[name], **changes)
  if kind is None:
    assert vocabulary.vocab_size == HuggingFaceVocabulary(files[name]).vocab_size
    return
  with pytest.raises(AnystepError) as failure:
    _ = vocabulary.vocab_size
  assert failure.value.kind == kind
  assert failure.value.code == (65 if kind == "vocabulary_invalid" else 78)
  assert failure.value.fields["path"] == str(files[name])
  for field, part in fields.items():
    assert part in failure.value.fields[field]


def test_says_which_package_is_missing(files, tmp_path, monkeypatch):
  path = tmp_path / "tokenizer.json"
  path.write_bytes(files["first"].read_bytes())
  monkeypatch.setitem(sys.modules, "tokenizers", None)
  with pytest.raises(AnystepError) as failure:
    HuggingFaceVocabulary(path).encode("text")
  assert (failure.value.code, failure.value.kind) == (78, "package_missing")
  assert "anystep[huggingface]" in failure.value.fix
