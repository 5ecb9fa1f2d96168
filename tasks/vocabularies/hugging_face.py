"""Vocabularies beside SeqIO's own: tokenizers of the Hugging Face hub, by their `tokenizer.json`.

SentencePiece models and bytes are SeqIO's own classes, `seqio.SentencePieceVocabulary` and
`seqio.ByteVocabulary`. `use_file` lets any of them read another file than they name.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from anystep.errors import AnystepError, ExitCode, find_nearest, make_package_error
from anystep.tasks.vocabularies.files import find_file, make_vocabulary_error, read_content, use_file

__all__ = ["HuggingFaceVocabulary", "use_file"]

_loading = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loaded:
  """Tokenizer after reading its file.

  Attributes:
    tokenizer: a `tokenizers.Tokenizer` with the sentinels as its last tokens.
    content_sha256: the file's sha256.
    ids: the vocabulary's id for each id of the tokenizer: `(tokens,) int32`.
    tokenizer_ids: the inverse, -1 if the tokenizer has no such id: `(vocabulary's size,) int32`.
  """

  tokenizer: Any
  content_sha256: str
  ids: np.ndarray
  tokenizer_ids: np.ndarray


class HuggingFaceVocabulary(seqio.Vocabulary):
  """A tokenizer of the `tokenizers` library as SeqIO's vocabulary.

  No special token is added to a text, whatever the tokenizer's post-processor says: end tokens are
  `seqio.preprocessors.append_eos`'s. SeqIO, converters and models take id 0 for padding, so it is: where the
  tokenizer's pad token has another id, the two change places; where it has none (`pad=None`), every id moves
  up by one. `tokenizer_ids` says what became of each, for the rows of pretrained embeddings.

  Two are equal where their files' bytes, special tokens and sentinels are. The file is read when it is first
  needed, once in a process.

  Args:
    tokenizer_file: the `tokenizer.json`, wherever TensorFlow reads.
    extra_ids: number of sentinels, SeqIO's `<extra_id_0>` (the last id), `<extra_id_1>`, … Where the
      tokenizer ends with them, as T5's does, these are they; else they are added.
    pad: the token that fills rows; None where the tokenizer has none.
    eos: the token that ends a sequence; None for none.
    unk: the token for what is unknown; None for none, as in tokenizers by bytes.
    bos: the token that begins a sequence; None for none.

  Raises:
    AnystepError: when the file is first needed: 66 `vocabulary_missing`; 65 `vocabulary_invalid`; 78
      `special_token`, `sentinels`, `tokenizer_random`, `package_missing`.
  """

  def __init__(
    self,
    tokenizer_file: str | os.PathLike[str],
    *,
    extra_ids: int = 0,
    pad: str | None = "<pad>",
    eos: str | None = "</s>",
    unk: str | None = "<unk>",
    bos: str | None = None,
  ):
    super().__init__(extra_ids=extra_ids)
    self.tokenizer_file = os.fspath(tokenizer_file)
    self._special_tokens = (("bos", bos), ("eos", eos), ("pad", pad), ("unk", unk))
    self._loaded: _Loaded | None = None

  def __getstate__(self) -> dict[str, Any]:
    return {**self.__dict__, "_loaded": None}

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, HuggingFaceVocabulary):
      return False
    if (self._special_tokens, self.extra_ids) != (other._special_tokens, other.extra_ids):
      return False
    # A mixture compares a vocabulary with itself, perhaps before the file exists.
    return self.tokenizer_file == other.tokenizer_file or self.content_sha256 == other.content_sha256

  __hash__ = None  # type: ignore[assignment]

  def __repr__(self) -> str:
    special = "".join(f", {name}={token!r}" for name, token in self._special_tokens)
    return f"HuggingFaceVocabulary({self.tokenizer_file!r}, extra_ids={self.extra_ids}{special})"

  @property
  def special_tokens(self) -> dict[str, str | None]:
    """The tokens that were named, by `pad`, `eos`, `unk` and `bos`."""
    return dict(self._special_tokens)

  @property
  def content_sha256(self) -> str:
    """sha256 of the file, by which fingerprints know the vocabulary."""
    return self._load().content_sha256

  @property
  def tokenizer(self) -> Any:
    """The `tokenizers.Tokenizer`, with its own ids."""
    return self._load().tokenizer

  @property
  def tokenizer_ids(self) -> np.ndarray:
    """The tokenizer's id of each of this vocabulary's, -1 where it has none: `(vocab_size,) int32`."""
    return self._load().tokenizer_ids

  @property
  def eos_id(self) -> int | None:
    return self._find_id("eos")

  @property
  def unk_id(self) -> int | None:
    return self._find_id("unk")

  @property
  def bos_id(self) -> int | None:
    return self._find_id("bos")

  @property
  def vocab_size(self) -> int:
    return self._base_vocab_size

  @property
  def _base_vocab_size(self) -> int:
    # As SeqIO's of SentencePiece: sentinels have texts, which are encoded and decoded.
    return len(self._load().tokenizer_ids)

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Encode several texts at once: `(tokens,) int32` each."""
    loaded = self._load()
    # Unlike encode, it lets other threads of Python run meanwhile.
    encodings = loaded.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [loaded.ids[np.array(encoding.ids, np.int64)] for encoding in encodings]

  def decode_batch(self, rows: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
    """Decode several rows of ids at once, without padding, begin and end tokens."""
    loaded = self._load()
    token_rows = [self._drop_special(np.asarray(row, np.int64)) for row in rows]
    return loaded.tokenizer.decode_batch(
      [loaded.tokenizer_ids[ids].tolist() for ids in token_rows], skip_special_tokens=False
    )

  def _drop_special(self, ids: np.ndarray) -> np.ndarray:
    in_range = (ids >= 0) & (ids < self.vocab_size)
    special_ids = [special for special in (self.pad_id, self.eos_id, self.bos_id) if special is not None]
    return ids[in_range & ~np.isin(ids, special_ids)]

  def _encode(self, s: str | bytes) -> list[int]:
    (ids,) = self.encode_batch([s.decode(errors="replace") if isinstance(s, bytes) else s])
    return ids.tolist()

  def _decode(self, ids: Sequence[int]) -> str:
    (text,) = self.decode_batch([ids])
    return text

  def _encode_tf(self, s: Any) -> Any:
    """`() string` to `(tokens,) int32`; `(rows,) string` to ragged `(rows, tokens)`, of any further rank."""
    self._load()
    if isinstance(s, tf.RaggedTensor):
      return s.with_values(self._encode_tf(s.values))
    s = tf.convert_to_tensor(s)
    if s.shape.rank == 0:
      ids = tf.numpy_function(self._encode_one, [s], tf.int32, stateful=False)
      return tf.ensure_shape(ids, [None])
    if s.shape.rank != 1:
      return self._encode_tf(tf.RaggedTensor.from_tensor(s, ragged_rank=s.shape.rank - 1))
    ids, lengths = tf.numpy_function(self._encode_rows, [s], [tf.int32, tf.int64], stateful=False)
    return tf.RaggedTensor.from_row_lengths(
      tf.ensure_shape(ids, [None]), tf.ensure_shape(lengths, s.shape), validate=False
    )

  def _encode_one(self, text: Any) -> np.ndarray:
    # In a graph bytes come, else an array of them.
    return self.encode_batch([np.asarray(text, object).item().decode(errors="replace")])[0]

  def _encode_rows(self, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = self.encode_batch([text.decode(errors="replace") for text in texts])
    return np.concatenate([np.empty(0, np.int32), *rows]), np.array([len(row) for row in rows], np.int64)

  def _decode_tf(self, ids: Any) -> Any:
    """`(…, tokens)` to `(…) string`."""
    self._load()
    ids = tf.convert_to_tensor(ids)
    texts = tf.numpy_function(self._decode_array, [ids], tf.string, stateful=False)
    return tf.ensure_shape(texts, ids.shape[:-1])

  def _decode_array(self, ids: np.ndarray) -> np.ndarray:
    texts = self.decode_batch(list(ids.reshape(-1, ids.shape[-1])))
    return np.array([text.encode() for text in texts], object).reshape(ids.shape[:-1])

  def _find_id(self, name: str) -> int | None:
    token = self.special_tokens[name]
    if token is None:
      return None
    loaded = self._load()
    return int(loaded.ids[loaded.tokenizer.token_to_id(token)])

  def _load(self) -> _Loaded:
    if self._loaded is None:
      with _loading:
        self._loaded = _read(find_file(self.tokenizer_file), self.extra_ids, self._special_tokens)
    return self._loaded


@functools.lru_cache(maxsize=16)
def _read(path: str, extra_ids: int, special_tokens: tuple[tuple[str, str | None], ...]) -> _Loaded:
  content = read_content(path)
  tokenizer = _parse_tokenizer(path, content)
  for name, token in special_tokens:
    if token is not None and tokenizer.token_to_id(token) is None:
      raise AnystepError(
        ExitCode.CONFIG,
        "special_token",
        path=path,
        expected=f"a token of the tokenizer, such as {find_nearest(token, _list_special(tokenizer))}",
        got=f"{name}={token!r}",
        fix=f"name it with {name}=, or say {name}=None where the tokenizer has none",
      )
  _add_sentinels(path, tokenizer, extra_ids)
  ids, tokenizer_ids = _map_ids(tokenizer, dict(special_tokens)["pad"])
  sha256 = hashlib.sha256(content).hexdigest()
  return _Loaded(tokenizer=tokenizer, content_sha256=sha256, ids=ids, tokenizer_ids=tokenizer_ids)


def _parse_tokenizer(path: str, content: bytes) -> Any:
  """Make the file's tokenizer, without truncation and padding."""
  # Callers run in several threads or processes already. The library's own threads would compete with them,
  # and be missing in processes that are forked later.
  os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
  try:
    from tokenizers import Tokenizer
  except ModuleNotFoundError as error:
    raise make_package_error(
      error, expected="tokenizers, for HuggingFaceVocabulary", package="'anystep[huggingface]'"
    ) from error
  try:
    tokenizer = Tokenizer.from_str(content.decode())
  except Exception as error:  # The library raises Exception itself.
    raise make_vocabulary_error(path, "a tokenizer.json of the tokenizers library", error) from error
  if getattr(tokenizer.model, "dropout", None):
    raise AnystepError(
      ExitCode.CONFIG,
      "tokenizer_random",
      path=path,
      expected="a tokenizer that encodes a text always alike",
      got=f"dropout={tokenizer.model.dropout:g}",
      fix="set model.dropout to null in a copy of the file",
    )
  tokenizer.no_truncation()
  tokenizer.no_padding()
  return tokenizer


def _list_special(tokenizer: Any) -> list[str]:
  """List the tokens that could be special tokens."""
  added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
  return added or list(tokenizer.get_vocab())


def _add_sentinels(path: str, tokenizer: Any, extra_ids: int) -> None:
  """Make the sentinels the last tokens, the first sentinel the very last."""
  from tokenizers import AddedToken

  names = [f"<extra_id_{k}>" for k in reversed(range(extra_ids))]
  tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
  size = _count_ids(tokenizer)
  placed = [tokenizer.token_to_id(name) for name in names]
  if placed != list(range(size - extra_ids, size)):
    raise AnystepError(
      ExitCode.CONFIG,
      "sentinels",
      path=path,
      expected=f"{names[0]} to {names[-1]} as the last of {size} ids",
      got=f"ids from {min(placed)} to {max(placed)}",
      fix="give extra_ids= as many sentinels as the tokenizer has, or use a tokenizer without them",
    )


def _map_ids(tokenizer: Any, pad: str | None) -> tuple[np.ndarray, np.ndarray]:
  """Ids of the tokenizer's tokens, with 0 for padding, and the inverse."""
  size = _count_ids(tokenizer)
  if pad is None:
    ids = np.arange(1, size + 1, dtype=np.int32)
  else:
    ids = np.arange(size, dtype=np.int32)
    pad_id = tokenizer.token_to_id(pad)
    ids[[0, pad_id]] = [pad_id, 0]
  tokenizer_ids = np.full(size + (pad is None), -1, np.int32)
  tokenizer_ids[ids] = np.arange(size, dtype=np.int32)
  return ids, tokenizer_ids


def _count_ids(tokenizer: Any) -> int:
  # Ids may have gaps, which get_vocab_size does not count.
  return max(tokenizer.get_vocab().values()) + 1
