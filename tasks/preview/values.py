"""Data of a preview: stages of a task's pipeline, their examples, and the features' values."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from anystep.errors import AnystepError
from anystep.features.ragged import Ragged
from anystep.tasks.vocabularies.decoding import decode_readable, describe_feature

# A token's text is what it adds to that of so many tokens before it: enough for a letter of several bytes.
_TOKENS_BEFORE = 8


class Piece(NamedTuple):
  """Token with its id, its own part of the text, and a flag for sentinels, the end and padding."""

  id: int
  text: str
  is_special: bool


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Value:
  """A feature of an example.

  Attributes:
    values: of any shape; `Ragged` for rows whose lengths differ.
    vocabulary: decodes token ids; None if the values are no tokens.
    kept: number of tokens within the feature's length; None if nothing is cut.
  """

  values: np.ndarray | Ragged
  vocabulary: Any = None
  kept: int | None = None

  @property
  def is_tokens(self) -> bool:
    """True if the values are token ids with a text."""
    return self.vocabulary is not None and self.values.ndim == 1 and self.values.dtype.kind in "iu"

  @property
  def form(self) -> str:
    """Kind and amount of the values: "31 tokens", "25 characters", "2 texts", "int64"."""
    if self.kept is not None:
      return f"{self.kept:,} of {len(self.values):,} kept"
    kind = "texts" if self.values.dtype.hasobject else str(self.values.dtype)
    if self.values.ndim:
      return f"{len(self.values):,} {'tokens' if self.is_tokens else kind}"
    text = self.to_json().get("text")
    return kind if text is None else f"{len(text):,} characters"

  @property
  def cut(self) -> int:
    """Number of tokens beyond the feature's length."""
    return 0 if self.kept is None else len(self.values) - self.kept

  @property
  def used(self) -> int:
    """Length of a sequence up to its last value that is not zero."""
    array = np.asarray(self.values)
    return len(array) if array.dtype.hasobject else int(np.flatnonzero(array).max(initial=-1)) + 1

  def pieces(self, start: int, stop: int) -> Iterator[Piece]:
    """The tokens of some places, where `is_tokens`."""
    ids = np.asarray(self.values)
    run = 0
    for place in range(max(start - _TOKENS_BEFORE, 0), min(stop, len(ids))):
      token, is_special = int(ids[place]), self._is_special(int(ids[place]))
      if is_special:
        run = place + 1
      if place >= start:
        text = self._format_special(token) if is_special else self._decode_alone(ids, run, place)
        yield Piece(token, text, is_special)

  def to_json(self) -> dict[str, Any]:
    """As `anystep-data show` has it, with `ids` besides the text of tokens and what is `cut` of them."""
    document = describe_feature(self.values, self.vocabulary)
    if self.is_tokens:
      document["ids"] = np.asarray(self.values).tolist()
    if self.kept is not None:
      document["cut"] = self.cut
      if self.cut:
        tail = describe_feature(self.values[self.kept :], self.vocabulary)
        document |= {f"cut_{name}": tail[name] for name in ("text", "values") if name in tail}
    return document

  def _is_special(self, token: int) -> bool:
    v = self.vocabulary
    return token in (v.pad_id, v.eos_id) or token >= v.vocab_size - (v.extra_ids or 0)

  def _format_special(self, token: int) -> str:
    # What stands at the end `readable` leaves out.
    return "<pad>" if token == self.vocabulary.pad_id else decode_readable(np.array([token]), self.vocabulary)

  def _decode_alone(self, ids: np.ndarray, run: int, place: int) -> str:
    first = max(run, place - _TOKENS_BEFORE)
    before = decode_readable(ids[first:place], self.vocabulary)
    text = decode_readable(ids[first : place + 1], self.vocabulary)
    if text.startswith(before):
      return text[len(before) :]
    return decode_readable(ids[place : place + 1], self.vocabulary)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Example:
  """An example at a stage.

  Attributes:
    label: its source example's number, with `.0` for the first of several that came of one.
    features: by name, those inside others joined by a slash.
    changed: the names of those that were not there before the stage, or were another.
    removed: the names of those that were there before the stage.
    siblings: how many came of the same example.
  """

  label: str
  features: Mapping[str, Value]
  changed: Sequence[str] = ()
  removed: Sequence[str] = ()
  siblings: int = 1

  @property
  def of_how_many(self) -> str:
    """Text after the label if the example is one of several."""
    return f", the first of {self.siblings:,} that one became" if self.siblings > 1 else ""

  def lines(self) -> Iterator[tuple[str, Value, bool]]:
    """Of a model's features those that are worth a line: name, value, and whether its sum says enough.

    The numbers that stand beside tokens are not, but for weights, whose sum counts the tokens with a loss.
    """
    aligned = {name for _, features in self.sides() for name, value in features if not value.is_tokens}
    for name, value in self.features.items():
      is_weights = name in aligned and name.endswith("weights")
      if is_weights or name not in aligned:
        yield name, value, is_weights

  def sides(self) -> Iterator[tuple[str, list[tuple[str, Value]]]]:
    """A model's features that stand side by side: those of one first word and length, by that word."""

    def side(item: tuple[str, Value]) -> tuple[str, int]:
      return item[0].partition("_")[0], len(item[1].values)

    flat = [(name, value) for name, value in self.features.items() if value.values.ndim == 1]
    for (word, _), group in itertools.groupby(sorted(flat, key=side), key=side):
      features = list(group)
      if len(features) > 1:
        yield word, features

  def to_json(self) -> dict[str, Any]:
    """As JSON."""
    return {
      "example": self.label,
      "siblings": self.siblings,
      "features": {name: value.to_json() for name, value in self.features.items()},
      "changed": list(self.changed),
      "removed": list(self.removed),
    }


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
  """A step of the pipeline, and what the examples are after it.

  Attributes:
    kind: what it is.
    name: the source's class, the preprocessor's name, or the model's.
    arguments: those that are bound, as text.
    examples: after the step.
    given: how many of those before the step were followed through it; None where it is no preprocessor.
    dropped: labels of those of them that are not left.
    notes: what is to be known, in sentences.
    problem: what the step raised; the examples are then those that it was given.
  """

  kind: Literal["source", "preprocessor", "cache", "trimmed", "model"]
  name: str
  arguments: Mapping[str, str] = dataclasses.field(default_factory=dict)
  examples: Sequence[Example] = ()
  given: int | None = None
  dropped: Sequence[str] = ()
  notes: Sequence[str] = ()
  problem: str | None = None

  @property
  def bound(self) -> str:
    """The arguments as they are written; nothing where there are none."""
    arguments = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
    return f"({arguments})" if arguments else ""

  @property
  def left(self) -> str:
    """Number of examples that are left, if some are dropped."""
    if not self.dropped or self.given is None:
      return ""
    return f"{self.given - len(self.dropped)} of {self.given} left, dropped: {', '.join(self.dropped)}"

  def to_json(self) -> dict[str, Any]:
    """As JSON."""
    return {
      "kind": self.kind,
      "name": self.name,
      "arguments": dict(self.arguments),
      "examples": [example.to_json() for example in self.examples],
      **({} if self.given is None else {"given": self.given}),
      "dropped": list(self.dropped),
      "notes": list(self.notes),
      **({} if self.problem is None else {"problem": self.problem}),
    }


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Preview:
  """A task's stages.

  Attributes:
    task, split, source_shard: whose examples these are.
    notes: what is to be known of all stages, in sentences.
    stages: from the source on, up to the first that fails.
    error: why there are no more; None where all are there.
  """

  task: str
  split: str
  source_shard: str
  notes: Sequence[str]
  stages: Sequence[Stage]
  error: AnystepError | None = None

  def to_json(self) -> list[dict[str, Any]]:
    """The stages as JSON objects."""
    where = {"task": self.task, "split": self.split, "source_shard": self.source_shard}
    return [{**where, "stage": k, **stage.to_json()} for k, stage in enumerate(self.stages)]
