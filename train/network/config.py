"""Sizes and choices that the layers of all families have, and the layers that they give."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from anystep.limits import is_count, is_number
from anystep.train.configuration.built_values import LEFT_OUT_AT_DEFAULT
from anystep.train.decoding.key_value_cache import CACHE, ENCODED, CacheUse, Step
from anystep.train.network.attention import (
  IMPLEMENTATIONS,
  MultiHeadAttention,
  cudnn_in_float32,
  cudnn_without_gradient,
)
from anystep.train.network.layers import LOOKUPS, Embedding, MlpBlock, RMSNorm, activation, dense
from anystep.train.network.relative_positions import RelativePositionBiases
from anystep.train.partitioning.rules import constrain

REMAT_POLICIES = ("none", "minimal", "full")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig(abc.ABC):
  """Sizes and choices that the layers of all families have; a family's own add the number of layers.

  Attributes:
    vocab_size: number of token ids; at least the vocabulary's, often padded to a multiple of 128.
    dtype: dtype of activations, as 'bfloat16'; parameters, norms' statistics and final logits are float32.
    emb_dim: size of the embeddings.
    num_heads: number of attention heads.
    head_dim: size of a head.
    mlp_dim: size of the feed-forward block's hidden layer.
    mlp_activations: see `MlpBlock`.
    dropout_rate: share of activations dropped in training; 0 for pretraining T5.1.1, 0.1 for finetuning.
    logits_via_embedding: whether the logits come from the embedding table (T5 1.0) rather than from a
      kernel of their own (T5.1.1).
    float32_attention_logits: whether attention logits are float32 where dtype is smaller, as they always are
      with other implementations than `reference`.
    attention_implementation: of self-attention, see `attention.attend`; cudnn is refused where its bias is
      learned, as T5's.
    embedding_lookup: see `layers.Embedding`.

  Raises:
    ValueError: a size is not a positive integer, a rate is not in [0, 1), or a name is unknown.
    AnystepError: 78 `attention_implementation` for cudnn with learned biases or a dtype that it does not
      compute with.
  """

  JOINED_KERNELS: ClassVar[bool] = True
  LEARNED_BIASES: ClassVar[bool] = True

  vocab_size: int
  dtype: Any = jnp.float32
  emb_dim: int = 512
  num_heads: int = 6
  head_dim: int = 64
  mlp_dim: int = 1024
  mlp_activations: Sequence[str] = ("gelu", "linear")
  dropout_rate: float = 0.0
  logits_via_embedding: bool = False
  float32_attention_logits: bool = False
  attention_implementation: str = dataclasses.field(default="reference", metadata=LEFT_OUT_AT_DEFAULT)
  embedding_lookup: str = dataclasses.field(default="one_hot", metadata=LEFT_OUT_AT_DEFAULT)

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.type is int and not is_count(value, least=1):
        raise ValueError(f"{self._of(field.name)}: expected a positive integer, got {value!r}")
      if field.type is bool and not isinstance(value, bool):
        raise ValueError(f"{self._of(field.name)}: expected True or False, got {value!r}")
    if not is_number(self.dropout_rate, least=0.0) or self.dropout_rate >= 1.0:
      raise ValueError(f"{self._of('dropout_rate')}: expected a rate in [0, 1), got {self.dropout_rate!r}")
    names = self.mlp_activations
    if not (isinstance(names, (list, tuple)) and names and all(isinstance(name, str) for name in names)):
      raise ValueError(
        f"{self._of('mlp_activations')}: expected names, as ('gelu',), got {self.mlp_activations!r}"
      )
    for name in self.mlp_activations:
      activation(name)
    self.check_name("attention_implementation", IMPLEMENTATIONS)
    self.check_name("embedding_lookup", LOOKUPS)
    if self.attention_implementation == "cudnn" and self.LEARNED_BIASES:
      raise cudnn_without_gradient()
    # What a configuration file gives, a list or a name, becomes hashable and comparable.
    object.__setattr__(self, "mlp_activations", tuple(self.mlp_activations))
    object.__setattr__(self, "dtype", self._dtype())
    self.check_cudnn("attention_implementation")

  @property
  def deciding_values(self) -> dict[str, str]:
    """Values besides the attributes that decide parameters: a run resumes only where they are the same."""
    # Version 0.1 drew masks by batch, and shared along the length that after the encoder's last norm.
    return {"dropout_masks": "by row"} if self.dropout_rate else {}

  def _dtype(self) -> jnp.dtype:
    """Return the dtype that was given, or its name."""
    try:
      dtype = None if self.dtype is None else jnp.dtype(self.dtype)
    except TypeError:
      dtype = None
    # The mask is -1e10, which float16 and float8 do not have; JAX would make float32 of float64.
    if dtype not in (jnp.float32, jnp.bfloat16):
      raise ValueError(f"{self._of('dtype')}: expected 'float32' or 'bfloat16', got {self.dtype!r}")
    return dtype

  def attention(self, name: str, *, implementation: str | None = None, **choices: Any) -> MultiHeadAttention:
    """Return attention with these sizes; `implementation` in place of self-attention's, and others."""
    return MultiHeadAttention(
      self.num_heads,
      self.head_dim,
      dtype=self.dtype,
      float32_logits=self.float32_attention_logits,
      implementation=implementation or self.attention_implementation,
      joined_kernels=self.JOINED_KERNELS,
      name=name,
      **choices,
    )

  def position_biases(self, *, bidirectional: bool) -> RelativePositionBiases:
    """Return T5's biases of self-attention: 32 buckets, of which the last begins at 128 tokens."""
    return RelativePositionBiases(
      self.num_heads, bidirectional=bidirectional, dtype=self.dtype, name="relpos_bias"
    )

  def decoder_biases(self, length: int, cache: CacheUse | None) -> jax.Array:
    """Return the biases of a decoder's self-attention for a call with this many tokens."""
    biases = self.position_biases(bidirectional=False)
    if isinstance(cache, Step):
      return biases(cache.length, query_positions=cache.positions)
    return biases(length)

  def mlp(self, name: str) -> MlpBlock:
    """Return a feed-forward block with these sizes."""
    return MlpBlock(self.mlp_dim, tuple(self.mlp_activations), dtype=self.dtype, name=name)

  def norm(self, name: str) -> RMSNorm:
    """Return a norm of this dtype."""
    return RMSNorm(dtype=self.dtype, name=name)

  def embedding(self, name: str | None = None, **choices: Any) -> Embedding:
    """Return the table of embeddings, with its other choices."""
    return Embedding(
      self.vocab_size, self.emb_dim, lookup=self.embedding_lookup, dtype=self.dtype, name=name, **choices
    )

  def logits(self, x: jax.Array, embedding: Embedding) -> jax.Array:
    """Return the logits of a stack's outputs: (rows, length, emb_dim) to (rows, length, vocab_size) float32.

    They are float32 whatever the dtype: a rounded softmax over the vocabulary spoils training.
    """
    if self.logits_via_embedding:
      logits = embedding.logits(x)
    else:
      logits = dense(self.vocab_size, ("embed", "vocab"), name="logits_dense", dtype=jnp.float32)(x)
    return constrain(logits, "batch", "length", "vocab")

  def check_name(self, attribute: str, names: Sequence[str]) -> None:
    """Raise ValueError if an attribute is none of the names."""
    value = getattr(self, attribute)
    if value not in names:
      raise ValueError(f"{self._of(attribute)}: expected one of {', '.join(names)}, got {value!r}")

  def check_cudnn(self, attribute: str) -> None:
    """Refuse cudnn as an implementation of attention in a dtype that it does not compute with.

    Raises:
      AnystepError: 78 `attention_implementation`.
    """
    if getattr(self, attribute) == "cudnn" and self.dtype != jnp.bfloat16:
      raise cudnn_in_float32(self.dtype, attribute)

  def _of(self, attribute: str) -> str:
    return f"{type(self).__name__}.{attribute}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScannedConfig(LayerConfig, abc.ABC):
  """Sizes and choices of families whose layers can be one loop.

  Attributes:
    remat_policy: what the backward pass computes again instead of keeping it: `none`; `minimal`, all but
      products with parameters; `full`, all of a layer.
    scan_layers: whether a stack is a loop over one layer; else its layers stand one after the other in the
      program, under the names layers_0, layers_1, ...
  """

  remat_policy: str = "none"
  scan_layers: bool = True

  def __post_init__(self):
    super().__post_init__()
    self.check_name("remat_policy", REMAT_POLICIES)

  def apply_layers(
    self,
    apply: Callable[..., jax.Array],
    make_layer: Callable[..., nn.Module],
    x: jax.Array,
    keys: list[jax.Array | None],
    *,
    name: str,
  ) -> jax.Array:
    """Apply as many layers as there are keys, one after the other.

    Args:
      apply: called as apply(layer, x, row_keys).
      make_layer: makes the layer of a name.
      x: (rows, length, emb_dim) float.
      keys: each layer's (rows,) keys of dropout, or None for each; see `layer_keys`.
      name: name of the one layer of a loop, whose parameters' second axis, `layers`, counts the layers.

    Returns:
      (rows, length, emb_dim).
    """
    if self.remat_policy != "none":
      policies = {"minimal": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims, "full": None}
      # In a loop XLA cannot merge the second computation with the first anyway.
      apply = nn.remat(apply, prevent_cse=not self.scan_layers, policy=policies[self.remat_policy])
    if not self.scan_layers:
      for i, row_keys in enumerate(keys):
        x = apply(make_layer(name=f"layers_{i}"), x, row_keys)
      return x
    scan = nn.scan(
      lambda module, x, row_keys: (apply(module, x, row_keys), None),
      variable_axes={"params": 1, CACHE: 1, ENCODED: 1},
      split_rngs={"params": True},
      length=len(keys),
      metadata_params={nn.PARTITION_NAME: "layers"},
    )
    drawn_keys = [row_keys for row_keys in keys if row_keys is not None]
    x, _ = scan(make_layer(name=name), x, jnp.stack(drawn_keys) if drawn_keys else None)
    return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(LayerConfig, abc.ABC):
  """Sizes and choices of encoder-decoder transformers.

  Attributes:
    num_encoder_layers: number of layers of the encoder.
    num_decoder_layers: number of layers of the decoder.
    cross_attention_implementation: of the decoder's attention to the encoder, see `attention.attend`.

  Raises:
    AnystepError: 78 `attention_implementation` for cudnn with a dtype that it does not compute with.
  """

  num_encoder_layers: int = 8
  num_decoder_layers: int = 8
  cross_attention_implementation: str = dataclasses.field(default="reference", metadata=LEFT_OUT_AT_DEFAULT)

  def __post_init__(self):
    super().__post_init__()
    self.check_name("cross_attention_implementation", IMPLEMENTATIONS)
    self.check_cudnn("cross_attention_implementation")
