"""A trained model in Python: loaded from a checkpoint of any format, it predicts and scores texts."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from anystep.errors import AnystepError, ExitCode
from anystep.features.ragged import Ragged
from anystep.train.configuration.built_values import built_values
from anystep.train.conversion.anystep_format import settings_of
from anystep.train.conversion.formats import SavedCheckpoint, open_checkpoint
from anystep.train.conversion.restoring import check_settings
from anystep.train.decoding.chunks import ChunkPlan, answer_chunks, bucket_length
from anystep.train.decoding.keys import example_keys
from anystep.train.decoding.steps import DecodeFn
from anystep.train.leaves.leaf import PARAMETERS, Leaves
from anystep.train.models.base import PredictingModel, Tree
from anystep.train.models.decoder_only import DecoderOnlyModel
from anystep.train.models.encoder_decoder import EncoderDecoderModel
from anystep.train.models.prediction import GREEDY, find_eos_id
from anystep.train.network.decoder_only import DecoderConfig, DecoderWrapper
from anystep.train.network.scalable_t5 import ScalableT5Config, ScalableTransformer
from anystep.train.network.t5 import T5Config, Transformer

Text = str | Sequence[int]
"""A text, or its token ids, which the end of sequence follows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
  """A model with its parameters. Texts are answered in chunks of neighbours by length (`decoding.ChunkPlan`).

  Attributes:
    model: the model.
    params: its parameters.
    step: steps that it was trained for; 0 where the checkpoint does not say.
    vocabulary: vocabulary of inputs and targets; None where token ids are given and returned.
    chunk_examples: number of texts that are computed at once.
  """

  model: PredictingModel
  params: Tree
  step: int
  vocabulary: Any = None
  chunk_examples: int = 8

  def predict(
    self,
    inputs: Sequence[Text],
    *,
    max_tokens: int = 64,
    decode_fn: DecodeFn = GREEDY,
    num_decodes: int = 1,
    seed: int = 0,
  ) -> list[Any]:
    """Return the prediction with the highest score for each input, in their order.

    Args:
      inputs: texts, or token ids.
      max_tokens: most tokens of a prediction.
      decode_fn: see `models.base.PredictingModel`. For a beam search of a decoder-only model, bind its
        max_decode_step too: else it goes on to the end of the padded row.
      num_decodes: number of beams or samples.
      seed: seed of what is drawn; an input's place in the list is its index.

    Returns:
      Texts, or lists of token ids where there is no vocabulary, without the end of sequence.
    """
    tokens = [self._encode(text) for text in inputs]
    eos_id = find_eos_id(self.vocabulary)
    predict = jax.jit(
      functools.partial(self.model.predict_batch, decode_fn=decode_fn, num_decodes=num_decodes)
    )

    def answer(batch: Any, indices: np.ndarray) -> Any:
      return predict(self.params, batch, keys=example_keys(seed, "predict", indices))

    nothing = [np.zeros(0, np.int32)] * len(tokens)
    answers = self._answer(tokens, nothing, answer, max_targets=max_tokens)
    predictions = []
    for row in answers:
      ids = row[:max_tokens].tolist()
      ids = ids[: ids.index(eos_id)] if eos_id in ids else ids
      predictions.append(ids if self.vocabulary is None else self.vocabulary.decode(ids))
    return predictions

  def score(self, inputs: Sequence[Text], targets: Sequence[Text]) -> np.ndarray:
    """Return the log-likelihood of each target after its input: (texts,) float32.

    Raises:
      ValueError: there are not as many targets as inputs.
    """
    if len(inputs) != len(targets):
      raise ValueError(f"score: expected a target for each of the {len(inputs)} inputs, got {len(targets)}")
    encoded_inputs, encoded_targets = ([self._encode(text) for text in texts] for texts in (inputs, targets))
    score = jax.jit(lambda params, batch: self.model.score_batch(params, batch)["scores"])
    answers = self._answer(
      encoded_inputs, encoded_targets, lambda batch, indices: score(self.params, batch), max_targets=None
    )
    return np.array(answers, np.float32)

  def _answer(
    self,
    inputs: list[np.ndarray],
    targets: list[np.ndarray],
    answer: Any,
    *,
    max_targets: int | None,
  ) -> list[np.ndarray]:
    """Return a row of answers for each example; without max_targets, targets are given and bucketed."""
    if not inputs:
      return []
    features = {"inputs": inputs, "targets": targets}
    sizes = {name: np.array([len(tokens) for tokens in rows]) for name, rows in features.items()}
    max_lengths = {name: max(1, int(lengths.max())) for name, lengths in sizes.items()}
    if max_targets is not None:
      max_lengths["targets"] = max_targets
      del sizes["targets"]
    plan = ChunkPlan(
      lengths=sizes,
      max_lengths={
        name: bucket_length(length) if name in sizes else length for name, length in max_lengths.items()
      },
      chunk_examples=self.chunk_examples,
    )

    def make_batch(indices: np.ndarray, lengths: dict[str, int]) -> Any:
      rows = {
        name: Ragged.of_rows([arrays[index] for index in indices], np.dtype(np.int32))
        for name, arrays in features.items()
      }
      return self.model.feature_converter(rows, lengths)

    by_index: dict[int, np.ndarray] = {}
    for chunk, rows in answer_chunks(plan, range(len(plan)), make_batch=make_batch, answer=answer):
      by_index |= dict(zip(chunk.indices.tolist(), rows, strict=True))
    return [by_index[index] for index in range(len(inputs))]

  def _encode(self, text: Text) -> np.ndarray:
    """Return a text's token ids with the end of sequence: (tokens,) int32.

    Raises:
      ValueError: it is a text and there is no vocabulary.
    """
    if isinstance(text, str):
      if self.vocabulary is None:
        raise ValueError("vocabulary: expected one to encode texts, got None; give load_model a vocabulary")
      text = self.vocabulary.encode(text)
    return np.array([*text, find_eos_id(self.vocabulary)], np.int32)


def load_model(
  path: str | os.PathLike[str],
  *,
  vocabulary: Any = None,
  model: PredictingModel | None = None,
  chunk_examples: int = 8,
) -> LoadedModel:
  """Return the model of a checkpoint: ours, T5X's, the original T5's, or Hugging Face's.

  Args:
    path: the checkpoint, or a directory of some, such as a run's, of which the newest is loaded.
    vocabulary: vocabulary of inputs and targets, such as a task's; None for models that are given token ids,
      and for Hugging Face's directories with a `tokenizer.json` or a `spiece.model`, which is then read.
    model: the model; None to tell T5, scalable T5 and decoder-only networks by their parameters.
    chunk_examples: see `LoadedModel`.

  Raises:
    AnystepError: 66 `checkpoint_missing`; 76 `checkpoint_tree` where the parameters are another model's,
      `checkpoint_settings` where its settings are; 78 `checkpoint_unsupported` where parameters tell no
      model; of the format as `anystep-convert`.
  """
  saved = open_checkpoint(os.fspath(path))
  leaves = {
    name.removeprefix(PARAMETERS): leaf for name, leaf in saved.leaves.items() if name.startswith(PARAMETERS)
  }
  if vocabulary is None:
    vocabulary = _find_vocabulary(saved.path)
  if model is None:
    model = _model_of(saved, leaves, vocabulary)
  check_settings(saved, settings_of(built_values({"model": model})))
  shapes = jax.eval_shape(lambda: model.initial_variables(jax.random.key(0)))["params"]
  expected = flatten_dict(shapes, sep="/")
  for name in sorted(expected.keys() | leaves.keys()):
    expected_shape = tuple(expected[name].shape) if name in expected else "no such parameter"
    saved_shape = leaves[name].shape if name in leaves else "no such parameter"
    if expected_shape != saved_shape:
      raise AnystepError(
        ExitCode.MISMATCH,
        "checkpoint_tree",
        path=saved.path,
        leaf=name,
        expected=expected_shape,
        got=saved_shape,
        fix="give load_model the model that the checkpoint is of",
      )
  arrays = {name: jnp.asarray(leaf.read_whole(), jnp.float32) for name, leaf in leaves.items()}
  return LoadedModel(
    model=model,
    params=unflatten_dict(arrays, sep="/"),
    step=saved.step,
    vocabulary=vocabulary,
    chunk_examples=chunk_examples,
  )


def _find_vocabulary(path: str) -> Any:
  """Return the vocabulary beside a model of Hugging Face; None where there is none."""
  if os.path.exists(os.path.join(path, "tokenizer.json")):
    from anystep.tasks.vocabularies import HuggingFaceVocabulary

    return HuggingFaceVocabulary(os.path.join(path, "tokenizer.json"))
  if os.path.exists(os.path.join(path, "spiece.model")):
    import seqio

    return seqio.SentencePieceVocabulary(os.path.join(path, "spiece.model"))
  return None


def _model_of(saved: SavedCheckpoint, leaves: Leaves, vocabulary: Any) -> PredictingModel:
  """Return the model that parameters' names and shapes tell.

  Raises:
    AnystepError: 78 `checkpoint_unsupported`.
  """
  try:
    return infer_model({name: leaf.shape for name, leaf in leaves.items()}, vocabulary=vocabulary)
  except KeyError as error:
    raise AnystepError(
      ExitCode.CONFIG,
      "checkpoint_unsupported",
      path=saved.path,
      expected="parameters of a T5, scalable T5 or decoder-only network",
      got=f"no {error.args[0]}",
      fix="give load_model the model: model=…",
    ) from error


def infer_model(shapes: Mapping[str, tuple[int, ...]], *, vocabulary: Any = None) -> PredictingModel:
  """Return the model of a T5, scalable T5 or decoder-only network with parameters of these names and shapes.

  Dropout is 0, and activations are float32. Gates of two kernels are taken for gated GELU's.

  Raises:
    KeyError: the name of a parameter that is not there.
  """
  has_encoder = any(name.startswith("encoder/") for name in shapes)
  is_scanned = any(name.startswith("encoder/encoder/") for name in shapes)
  first = "encoder/encoder" if is_scanned else "encoder/layers_0" if has_encoder else "decoder/layers_0"
  attention = "attention" if has_encoder else "self_attention"
  own_biases = f"{first}/relpos_bias/rel_embedding" in shapes
  biases = shapes[f"{first if own_biases else first.split('/')[0]}/relpos_bias/rel_embedding"]
  num_heads = biases[0]
  query = shapes[f"{first}/{attention}/query/kernel"]
  above = "" if has_encoder else "decoder/"
  vocab_size, emb_dim = shapes[f"{above}token_embedder/embedding"]
  sizes: dict[str, Any] = {
    "vocab_size": vocab_size,
    "emb_dim": emb_dim,
    "num_heads": num_heads,
    "head_dim": query[-1] if own_biases else query[-1] // num_heads,
    "mlp_dim": shapes[f"{first}/mlp/wo/kernel"][0],
    "mlp_activations": ("relu",) if f"{first}/mlp/wi/kernel" in shapes else ("gelu", "linear"),
    "logits_via_embedding": "decoder/logits_dense/kernel" not in shapes,
  }

  def count_layers(stack: str) -> int:
    if is_scanned:
      return shapes[f"{stack}/{stack}/pre_mlp_layer_norm/scale"][1]
    return len({name.split("/")[1] for name in shapes if name.startswith(f"{stack}/layers_")})

  if not has_encoder:
    config = DecoderConfig(**sizes, num_layers=count_layers("decoder"))
    return DecoderOnlyModel(DecoderWrapper(config), vocabulary=vocabulary)
  sizes |= {f"num_{stack}_layers": count_layers(stack) for stack in ("encoder", "decoder")}
  if own_biases:
    network: Any = ScalableTransformer(ScalableT5Config(**sizes, scan_layers=is_scanned))
  else:
    network = Transformer(T5Config(**sizes))
  return EncoderDecoderModel(network, input_vocabulary=vocabulary, output_vocabulary=vocabulary)
