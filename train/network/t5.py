"""T5.1.1: an encoder-decoder transformer (Raffel et al. 2020, https://arxiv.org/abs/1910.10683).

Its parameters have the names, shapes and logical axes of T5X's, so that checkpoints pass both ways. Dropout
is on where `apply` gets a `dropout` RNG, and off where it gets none.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from anystep.train.network.attention import MultiHeadAttention, attention_mask
from anystep.train.network.dropout import draw_dropout
from anystep.train.network.layers import MlpBlock, activation, dense, rms_norm
from anystep.train.network.relative_positions import RelativePositionBiases


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config:
  """Sizes of a T5; the defaults are those of T5.1.1 small.

  Attributes:
    vocab_size: number of token ids; at least the vocabulary's, often padded to a multiple of 128.
    dtype: dtype of activations, as 'bfloat16'; parameters, norms' statistics and final logits are float32.
    emb_dim: size of the embeddings.
    num_heads: number of attention heads.
    num_encoder_layers: number of layers of the encoder.
    num_decoder_layers: number of layers of the decoder.
    head_dim: size of a head.
    mlp_dim: size of the feed-forward block's hidden layer.
    mlp_activations: see `MlpBlock`.
    dropout_rate: share of activations dropped in training; 0 for pretraining T5.1.1, 0.1 for finetuning.
    logits_via_embedding: whether the logits come from the embedding table (T5.1.0) rather than from a
      kernel of their own (T5.1.1).
    float32_attention_logits: whether attention logits are float32 where dtype is smaller.

  Raises:
    ValueError: a size is not a positive integer, a rate is not in [0, 1), or an activation is unknown.
  """

  vocab_size: int
  dtype: Any = jnp.float32
  emb_dim: int = 512
  num_heads: int = 6
  num_encoder_layers: int = 8
  num_decoder_layers: int = 8
  head_dim: int = 64
  mlp_dim: int = 1024
  mlp_activations: Sequence[str] = ("gelu", "linear")
  dropout_rate: float = 0.0
  logits_via_embedding: bool = False
  float32_attention_logits: bool = False

  def __post_init__(self):
    for field in dataclasses.fields(self):
      size = getattr(self, field.name)
      if field.type is int and not (type(size) is int and size > 0):
        raise ValueError(f"T5Config.{field.name}: expected a positive integer, got {size!r}")
    if not 0.0 <= self.dropout_rate < 1.0:
      raise ValueError(f"T5Config.dropout_rate: expected a rate in [0, 1), got {self.dropout_rate!r}")
    if not self.mlp_activations or isinstance(self.mlp_activations, str):
      raise ValueError(
        f"T5Config.mlp_activations: expected names, as ('gelu',), got {self.mlp_activations!r}"
      )
    for name in self.mlp_activations:
      activation(name)
    # What a configuration file gives, a list or a name, becomes hashable and comparable.
    object.__setattr__(self, "mlp_activations", tuple(self.mlp_activations))
    object.__setattr__(self, "dtype", jnp.dtype(self.dtype))


def _attention(cfg: T5Config, name: str) -> MultiHeadAttention:
  return MultiHeadAttention(
    cfg.num_heads, cfg.head_dim, dtype=cfg.dtype, float32_logits=cfg.float32_attention_logits, name=name
  )


def _mlp(cfg: T5Config, name: str) -> MlpBlock:
  return MlpBlock(cfg.mlp_dim, tuple(cfg.mlp_activations), dtype=cfg.dtype, name=name)


def _norm(cfg: T5Config, name: str) -> nn.RMSNorm:
  return rms_norm(name=name, dtype=cfg.dtype)


class EncoderLayer(nn.Module):
  """Self-attention and feed-forward block, each normalised before and added to its input."""

  config: T5Config

  @nn.compact
  def __call__(self, x: jax.Array, *, mask: jax.Array, bias: jax.Array) -> jax.Array:
    """(rows, length, emb_dim) to the same; mask and bias as of `MultiHeadAttention`."""
    cfg = self.config
    rows, length, emb_dim = x.shape
    drop = draw_dropout(
      self,
      cfg.dropout_rate,
      rows=rows,
      shapes={
        "weights": (cfg.num_heads, 1, length),
        "attention": (1, emb_dim),
        "hidden": (1, cfg.mlp_dim),
        "mlp": (1, emb_dim),
      },
      dtype=cfg.dtype,
    )
    y = _norm(cfg, "pre_attention_layer_norm")(x)
    y = _attention(cfg, "attention")(y, y, mask=mask, bias=bias, weight_dropout=drop["weights"])
    x += y * drop["attention"]
    y = _norm(cfg, "pre_mlp_layer_norm")(x)
    y = _mlp(cfg, "mlp")(y, hidden_dropout=drop["hidden"])
    return x + y * drop["mlp"]


class DecoderLayer(nn.Module):
  """Self-attention, attention to the encoder, and feed-forward block, each as in `EncoderLayer`."""

  config: T5Config

  @nn.compact
  def __call__(
    self, x: jax.Array, encoded: jax.Array, *, mask: jax.Array, cross_mask: jax.Array, bias: jax.Array
  ) -> jax.Array:
    """(rows, length, emb_dim) to the same; `encoded` is (rows, encoder_length, emb_dim)."""
    cfg = self.config
    rows, length, emb_dim = x.shape
    drop = draw_dropout(
      self,
      cfg.dropout_rate,
      rows=rows,
      shapes={
        "weights": (cfg.num_heads, 1, length),
        "attention": (1, emb_dim),
        "cross_weights": (cfg.num_heads, 1, encoded.shape[1]),
        "cross_attention": (1, emb_dim),
        "hidden": (1, cfg.mlp_dim),
        "mlp": (1, emb_dim),
      },
      dtype=cfg.dtype,
    )
    y = _norm(cfg, "pre_self_attention_layer_norm")(x)
    y = _attention(cfg, "self_attention")(y, y, mask=mask, bias=bias, weight_dropout=drop["weights"])
    x += y * drop["attention"]
    y = _norm(cfg, "pre_cross_attention_layer_norm")(x)
    y = _attention(cfg, "encoder_decoder_attention")(
      y, encoded, mask=cross_mask, weight_dropout=drop["cross_weights"]
    )
    x += y * drop["cross_attention"]
    y = _norm(cfg, "pre_mlp_layer_norm")(x)
    y = _mlp(cfg, "mlp")(y, hidden_dropout=drop["hidden"])
    return x + y * drop["mlp"]


class Encoder(nn.Module):
  """The layers of the encoder, with one table of position biases for all."""

  config: T5Config

  @nn.compact
  def __call__(self, x: jax.Array, *, mask: jax.Array) -> jax.Array:
    """(rows, length, emb_dim) embeddings to the same; mask as of `attention_mask`."""
    cfg = self.config
    rows, length, emb_dim = x.shape
    ends = {"first": (1, emb_dim), "last": (1, emb_dim)}
    drop = draw_dropout(self, cfg.dropout_rate, rows=rows, shapes=ends, dtype=cfg.dtype)
    biases = RelativePositionBiases(cfg.num_heads, bidirectional=True, dtype=cfg.dtype, name="relpos_bias")
    bias = biases(length)
    x *= drop["first"]
    for i in range(cfg.num_encoder_layers):
      x = EncoderLayer(cfg, name=f"layers_{i}")(x, mask=mask, bias=bias)
    return _norm(cfg, "encoder_norm")(x) * drop["last"]


class Decoder(nn.Module):
  """The layers of the decoder, with one table of position biases for all, and the logits."""

  config: T5Config

  @nn.compact
  def __call__(
    self, x: jax.Array, encoded: jax.Array, *, mask: jax.Array, cross_mask: jax.Array, embedding: jax.Array
  ) -> jax.Array:
    """From embeddings to logits.

    Args:
      x: (rows, length, emb_dim) float, embedded decoder inputs.
      encoded: (rows, encoder_length, emb_dim) float, what the encoder returned.
      mask: (rows, 1, length, length) bool.
      cross_mask: (rows, 1, length, encoder_length) bool.
      embedding: (vocab_size, emb_dim) float32, the embedding table, for `logits_via_embedding`.

    Returns:
      Logits, (rows, length, vocab_size) float32.
    """
    cfg = self.config
    rows, length, emb_dim = x.shape
    ends = {"first": (1, emb_dim), "last": (1, emb_dim)}
    drop = draw_dropout(self, cfg.dropout_rate, rows=rows, shapes=ends, dtype=cfg.dtype)
    biases = RelativePositionBiases(cfg.num_heads, bidirectional=False, dtype=cfg.dtype, name="relpos_bias")
    bias = biases(length)
    x *= drop["first"]
    for i in range(cfg.num_decoder_layers):
      x = DecoderLayer(cfg, name=f"layers_{i}")(x, encoded, mask=mask, cross_mask=cross_mask, bias=bias)
    x = _norm(cfg, "decoder_norm")(x) * drop["last"]
    # Final logits are float32 whatever the dtype: a rounded softmax over the vocabulary spoils training.
    x = x.astype(jnp.float32)
    if cfg.logits_via_embedding:
      return jnp.einsum("ble,ve->blv", x * emb_dim**-0.5, embedding)
    return dense(cfg.vocab_size, ("embed", "vocab"), name="logits_dense", dtype=jnp.float32)(x)


class Transformer(nn.Module):
  """T5: from the tokens of the encoder and of the teacher-forced decoder to logits.

  Token id 0 is padding. In packed rows the segment ids keep examples apart; positions within a segment
  are not needed, since T5 knows distances only.
  """

  config: T5Config

  def setup(self):
    cfg = self.config
    self.token_embedder = nn.Embed(
      cfg.vocab_size,
      cfg.emb_dim,
      dtype=cfg.dtype,
      embedding_init=nn.with_logical_partitioning(nn.initializers.normal(1.0), ("vocab", "embed")),
    )
    self.encoder = Encoder(cfg)
    self.decoder = Decoder(cfg)

  def __call__(
    self,
    encoder_input_tokens: jax.Array,
    decoder_input_tokens: jax.Array,
    *,
    decoder_target_tokens: jax.Array,
    encoder_segment_ids: jax.Array | None = None,
    decoder_segment_ids: jax.Array | None = None,
  ) -> jax.Array:
    """Logits for every target, each from the targets before it.

    Args:
      encoder_input_tokens: (rows, encoder_length) int32.
      decoder_input_tokens: (rows, decoder_length) int32, the targets shifted right by one.
      decoder_target_tokens: (rows, decoder_length) int32, for the mask alone: where they are padding, so
        are the decoder's inputs.
      encoder_segment_ids: (rows, encoder_length) int32, for packed rows, 0 at padding.
      decoder_segment_ids: (rows, decoder_length) int32, the same; both or neither.

    Returns:
      (rows, decoder_length, vocab_size) float32.
    """
    encoded = self.encode(encoder_input_tokens, encoder_segment_ids=encoder_segment_ids)
    return self.decode(
      encoded,
      decoder_input_tokens,
      encoder_input_tokens=encoder_input_tokens,
      decoder_target_tokens=decoder_target_tokens,
      encoder_segment_ids=encoder_segment_ids,
      decoder_segment_ids=decoder_segment_ids,
    )

  def encode(
    self, encoder_input_tokens: jax.Array, *, encoder_segment_ids: jax.Array | None = None
  ) -> jax.Array:
    """The encoder's half of `__call__`: (rows, encoder_length, emb_dim)."""
    valid = encoder_input_tokens > 0
    mask = attention_mask(valid, valid, query_segments=encoder_segment_ids, key_segments=encoder_segment_ids)
    return self.encoder(self.token_embedder(encoder_input_tokens), mask=mask)

  def decode(
    self,
    encoded: jax.Array,
    decoder_input_tokens: jax.Array,
    *,
    encoder_input_tokens: jax.Array,
    decoder_target_tokens: jax.Array,
    encoder_segment_ids: jax.Array | None = None,
    decoder_segment_ids: jax.Array | None = None,
  ) -> jax.Array:
    """The decoder's half of `__call__`: logits, from what `encode` returned."""
    valid = decoder_target_tokens > 0
    mask = attention_mask(
      valid, valid, query_segments=decoder_segment_ids, key_segments=decoder_segment_ids, causal=True
    )
    cross_mask = attention_mask(
      valid, encoder_input_tokens > 0, query_segments=decoder_segment_ids, key_segments=encoder_segment_ids
    )
    return self.decoder(
      self.token_embedder(decoder_input_tokens),
      encoded,
      mask=mask,
      cross_mask=cross_mask,
      embedding=self.token_embedder.embedding,
    )
