"""A cache's copies of vocabularies' files, used if the original files are gone.

A copy is `vocabularies/<sha256 of its bytes>` in the task's directory; a manifest's provenance names the
copy of each feature's vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import seqio
from etils import epath

from anystep.caches.cache import Cache
from anystep.caches.manifest import Manifest
from anystep.earlier_names import lasting_name
from anystep.errors import AnystepError, ExitCode
from anystep.files import names, storage
from anystep.files.json_files import MALFORMED
from anystep.limits import MAX_FEATURE_LENGTH, is_count
from anystep.programs.progress import log_notice
from anystep.tasks import seqio_internals
from anystep.tasks.vocabularies.files import is_there, read_content, use_file
from anystep.tasks.vocabularies.hugging_face import HuggingFaceVocabulary
from anystep.transforms.identity import describe


def get_file(vocabulary: seqio.Vocabulary) -> str | None:
  """Return the file that a vocabulary names; None if it names none."""
  if isinstance(vocabulary, HuggingFaceVocabulary):
    return vocabulary.tokenizer_file
  return seqio_internals.model_file(vocabulary)


def hash_vocabularies(task: seqio.Task) -> dict[str, str]:
  """Return the sha256 of each vocabulary's file, by output feature.

  Raises:
    AnystepError: 66 `vocabulary_missing`.
  """
  return {name: _sha256(read_content(file)) for name, file in _list_files(task).items()}


def keep_copies(task: seqio.Task, directory: epath.Path, manifests: Iterable[Manifest]) -> None:
  """Copy the files of a task's vocabularies that manifests name; existing copies stay.

  Raises:
    AnystepError: 66 `vocabulary_missing`; 65 `vocabulary_changed` if a file has changed since its vocabulary
      was read.
  """
  sha256_by_feature = {
    feature: sha256
    for manifest in manifests
    for feature, sha256 in manifest.fingerprint.provenance.get("vocabularies", {}).items()
  }
  for feature, sha256 in sha256_by_feature.items():
    vocabulary = task.output_features[feature].vocabulary
    content = read_content(_list_files(task)[feature])
    path = names.vocabulary_path(directory, sha256)
    if _sha256(content) == sha256 and not (path.exists() and path.read_bytes() == content):
      path.parent.mkdir(exist_ok=True)
      storage.put(path, content)
    if _sha256(content) != sha256 or not _is_made_of(vocabulary, path):
      raise AnystepError(
        ExitCode.DATA,
        "vocabulary_changed",
        task=task.name,
        feature=feature,
        path=get_file(vocabulary),
        expected="the file that the task was cached with",
        got="another one by now",
        fix="run the same command again, and leave the file alone meanwhile",
      )


def remove_unused_copies(directory: epath.Path, splits: Iterable[str]) -> None:
  """Remove copies that no manifest of these splits names."""
  folder = directory / names.VOCABULARIES
  if not folder.exists():
    return
  used: set[str] = set()
  for split in splits:
    path = directory / names.manifest_name(split)
    manifest = Manifest.from_json(path.read_bytes(), path=path)
    used.update(manifest.fingerprint.provenance.get("vocabularies", {}).values())
  for path in folder.iterdir():
    if path.name not in used:
      path.unlink()
  if not used:
    folder.rmdir()


def use_copies(task: seqio.Task, cache: Cache) -> None:
  """Use a cache's copies for a task's vocabularies whose files are gone, with a notice.

  Raises:
    AnystepError: 65 `file_missing`, `file_changed` if the copy itself is.
  """
  for feature, file in _list_files(task).items():
    sha256 = cache.vocabularies.get(feature)
    if sha256 is None or is_there(file):
      continue
    cache.vocabulary(sha256)
    path = names.vocabulary_path(cache.directory, sha256)
    log_notice(f"{task.name}: {file} cannot be read; the cache's copy is used, {path}")
    use_file(file, path)


def cached_vocabularies(cache: Cache) -> dict[str, seqio.Vocabulary]:
  """Return the vocabularies that can be vocabularies from a cache without its task, by output feature.

  These are bytes, and SentencePiece models and tokenizers that have a copy.

  Raises:
    AnystepError: 65 `file_missing`, `file_changed` if a copy is.
  """
  features = cache.manifest.fingerprint.reader.get("output_features", {})
  vocabularies = {}
  for feature, described in features.items():
    sha256 = cache.vocabularies.get(feature)
    # A vocabulary whose description is incomplete, such as one with a changed normalizer, is left out.
    try:
      vocabulary = _rebuild(described["vocabulary"], cache, sha256)
    except MALFORMED:
      continue
    if vocabulary is not None and describe(vocabulary) == described["vocabulary"]:
      vocabularies[feature] = vocabulary
  return vocabularies


def _rebuild(described: Mapping[str, Any], cache: Cache, sha256: str | None) -> seqio.Vocabulary | None:
  extra_ids = described["extra_ids"]
  if not is_count(extra_ids, most=MAX_FEATURE_LENGTH):
    return None
  if described["class"] == _class_name(seqio.ByteVocabulary):
    return seqio.ByteVocabulary(extra_ids=extra_ids)
  if sha256 is None:
    return None
  cache.vocabulary(sha256)
  path = str(names.vocabulary_path(cache.directory, sha256))
  if described["class"] == _class_name(seqio.SentencePieceVocabulary):
    return seqio.SentencePieceVocabulary(path, extra_ids=extra_ids)
  if described["class"] == _class_name(HuggingFaceVocabulary):
    return HuggingFaceVocabulary(path, extra_ids=extra_ids, **described["special_tokens"])
  return None


def _is_made_of(vocabulary: seqio.Vocabulary, path: epath.Path) -> bool:
  """Return whether a vocabulary, as it was read, equals one read from a file."""
  if isinstance(vocabulary, HuggingFaceVocabulary):
    of_copy = copy.copy(vocabulary)
    of_copy.tokenizer_file = str(path)
  elif isinstance(vocabulary, seqio.SentencePieceVocabulary):
    of_copy = seqio_internals.with_model_file(vocabulary, str(path))
  else:
    return True
  return describe(of_copy) == describe(vocabulary)


def _list_files(task: seqio.Task) -> dict[str, str]:
  files = {name: get_file(feature.vocabulary) for name, feature in task.output_features.items()}
  return {name: file for name, file in files.items() if file is not None}


def _class_name(kind: type) -> str:
  return f"{lasting_name(kind.__module__)}.{kind.__qualname__}"


def _sha256(content: bytes) -> str:
  return hashlib.sha256(content).hexdigest()
