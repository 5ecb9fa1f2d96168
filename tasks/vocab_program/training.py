"""Training of SentencePiece models on text, and how well a model covers it."""

from __future__ import annotations

import dataclasses
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from anystep.errors import AnystepError, ExitCode

MODEL_TYPES = ("unigram", "bpe")
# The sums that decide a unigram model are made by thread: another number of them is another model.
_THREADS = 16
# SentencePiece leaves out longer ones.
_PIECE_BYTES = 4096
# In pieces, a space.
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
# One example in so many is held out, and so many at most.
_HELD_OUT_PERIOD, _HELD_OUT_EXAMPLES = 20, 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingOptions:
  """Options of a SentencePiece model.

  Attributes:
    size: number of pieces, padding, end and unknown (ids 0, 1, 2) among them.
    model_type: `unigram` or `bpe`.
    character_coverage: share of the text's characters that get pieces; rarer ones are unknown.
    byte_fallback: characters without a piece become pieces of bytes, in place of unknown.
  """

  size: int
  model_type: str = "unigram"
  character_coverage: float = 0.9995
  byte_fallback: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coverage:
  """Statistics of a model's encoding of texts.

  Attributes:
    characters: of the texts, as the model normalizes them.
    normalized_bytes: the same in UTF-8.
    uncovered_characters: those that are unknown or become single bytes; `uncovered_bytes` in UTF-8.
    tokens: all; `unknown_tokens` of them unknown, `byte_tokens` single bytes.
    text_bytes: of the texts as they are, in UTF-8.
  """

  characters: int
  normalized_bytes: int
  uncovered_characters: int
  uncovered_bytes: int
  tokens: int
  unknown_tokens: int
  byte_tokens: int
  text_bytes: int

  @classmethod
  def of(cls, model: bytes, texts: Iterable[str]) -> Coverage:
    """Encodes texts with a serialized model and counts."""
    processor = load_processor(model)
    counts = dict.fromkeys((field.name for field in dataclasses.fields(cls)), 0)
    for text in texts:
      counts["text_bytes"] += len(text.encode())
      ids, pieces = processor.encode_as_ids(text), processor.encode_as_pieces(text)
      for token, piece in zip(ids, pieces, strict=True):
        unknown, is_byte = token == processor.unk_id(), processor.is_byte(token)
        content = bytes([int(piece[3:5], 16)]) if is_byte else piece.replace(_SPACE, " ").encode()
        # Every byte but those that go on with a character: 10xxxxxx.
        characters = sum(byte & 0xC0 != 0x80 for byte in content)
        counts["tokens"] += 1
        counts["unknown_tokens"] += unknown
        counts["byte_tokens"] += is_byte
        counts["characters"] += characters
        counts["normalized_bytes"] += len(content)
        if unknown or is_byte:
          counts["uncovered_characters"] += characters
          counts["uncovered_bytes"] += len(content)
    return cls(**counts)

  def lines(self) -> list[str]:
    """The counts as shares, for people."""
    covered = 1 - self.uncovered_characters / max(self.characters, 1)
    covered_bytes = 1 - self.uncovered_bytes / max(self.normalized_bytes, 1)
    unknown, single = (count / max(self.tokens, 1) for count in (self.unknown_tokens, self.byte_tokens))
    bytes_a_token = self.text_bytes / max(self.tokens, 1)
    return [
      f"covered: {covered:.4%} of {self.characters:,} characters, {covered_bytes:.4%} of their bytes",
      f"unknown: {unknown:.4%} of {self.tokens:,} tokens; single bytes: {single:.4%}",
      f"tokens per byte: {self.tokens / max(self.text_bytes, 1):.4f} ({bytes_a_token:.2f} bytes a token)",
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedModel:
  """A SentencePiece model, serialized, and what it was made of.

  Attributes:
    content: the bytes of its file.
    trained_examples: how many it was trained on.
    held_out: texts that it was not trained on.
    first_texts: the first ones, which it was trained on: what there is where none could be held out.
  """

  content: bytes
  trained_examples: int
  held_out: Sequence[str]
  first_texts: Sequence[str]


def train_model(texts: Iterable[str], options: TrainingOptions) -> TrainedModel:
  """Trains a model with SeqIO's special ids: padding 0, end 1, unknown 2.

  The same texts in the same order give the same bytes. The trainer holds all texts in memory.

  Args:
    texts: of examples; the 20th, 40th, … of them, 2,000 at most, are held out.
    options: what the model is to be.

  Raises:
    AnystepError: 64 `vocabulary_size` where the texts have not enough for so many pieces, or too many
      characters for so few; 66 `texts_empty`; whatever reading the texts raises.
  """
  import sentencepiece

  held_out: list[str] = []
  first_texts: list[str] = []
  trained = itertools.count()
  failures: list[BaseException] = []

  def lines() -> Iterator[str]:
    try:
      for place, text in enumerate(texts):
        if place % _HELD_OUT_PERIOD == _HELD_OUT_PERIOD - 1 and len(held_out) < _HELD_OUT_EXAMPLES:
          held_out.append(text)
        else:
          if next(trained) < _HELD_OUT_PERIOD:
            first_texts.append(text)
          yield from cut_lines(text)
    except BaseException as error:
      # SentencePiece would make a text of it.
      failures.append(error)

  writer = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=lines(),
      model_writer=writer,
      vocab_size=options.size,
      model_type=options.model_type,
      character_coverage=options.character_coverage,
      byte_fallback=options.byte_fallback,
      pad_id=0,
      eos_id=1,
      unk_id=2,
      bos_id=-1,
      num_threads=_THREADS,
      shuffle_input_sentence=False,
      minloglevel=2,
    )
  except RuntimeError as error:
    refused = _explain_refusal(str(error), options)
    if refused is not None and not failures:
      raise refused from error
    if not failures:
      raise
  if failures:
    raise failures[0]
  return TrainedModel(
    content=writer.getvalue(), trained_examples=next(trained), held_out=held_out, first_texts=first_texts
  )


def load_processor(model: bytes) -> Any:
  """Return the `sentencepiece.SentencePieceProcessor` of a serialized model."""
  import sentencepiece

  return sentencepiece.SentencePieceProcessor(model_proto=model)


def cut_lines(text: str) -> Iterator[str]:
  """A text's lines, cut after a space or, within words, anywhere, to at most 4,096 bytes each.

  >>> list(cut_lines("a line\\n\\nanother"))
  ['a line', 'another']
  """
  for line in text.splitlines():
    rest = line.encode(errors="replace")
    while len(rest) > _PIECE_BYTES:
      head = rest[:_PIECE_BYTES]
      # Never within a character: continuation bytes are 10xxxxxx.
      stop = head.rfind(b" ") + 1 or _find_last_start(rest)
      yield rest[:stop].decode()
      rest = rest[stop:]
    if rest:
      yield rest.decode()


def _find_last_start(content: bytes) -> int:
  stop = _PIECE_BYTES
  while content[stop] & 0xC0 == 0x80:
    stop -= 1
  return stop


def _explain_refusal(message: str, options: TrainingOptions) -> AnystepError | None:
  """The error for texts that no such model can be made of; None where something else is wrong."""
  if "sentences_.empty()" in message:
    return AnystepError(
      ExitCode.NO_INPUT,
      "texts_empty",
      expected="texts to train on",
      got="none that is not empty",
      fix="check the split, the feature or the files that were named",
    )
  if "ocabulary size" not in message:
    return None
  bound = re.search(r"to a value <= (\d+)", message)
  return AnystepError(
    ExitCode.USAGE,
    "vocabulary_size",
    expected=f"at most {bound[1]}" if bound else "a size that the texts allow",
    got=options.size,
    cause=message.rpartition("] ")[2] or message,
    fix="give another --size"
    + ("" if bound else ", a lower --character_coverage or more text with --max_examples"),
  )
