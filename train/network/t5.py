"""T5 1.0 and T5.1.1, of which mT5 and ByT5 are sizes: encoder-decoder transformers (Raffel et al. 2020).

https://arxiv.org/abs/1910.10683. Parameters have the names, shapes and logical axes of T5X's, so that
checkpoints pass both ways. Dropout is on where `apply` gets keys for it, and off where it gets none.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from anystep.train.decoding.key_value_cache import CacheUse, Prefill, Step
from anystep.train.network.attention import attention_mask
from anystep.train.network.config import EncoderDecoderConfig
from anystep.train.network.dropout import draw_dropout, layer_keys
from anystep.train.network.layers import Embedding
from anystep.train.partitioning.rules import constrain

# Numbers of the stacks in the keys of dropout.
ENCODER, DECODER = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(EncoderDecoderConfig):
  """Sizes of a T5; the defaults are those of T5.1.1 small."""


class EncoderLayer(nn.Module):
  """Self-attention and feed-forward block, each normalised before and added to its input."""

  config: EncoderDecoderConfig

  @nn.compact
  def __call__(
    self, x: jax.Array, *, mask: jax.Array, bias: jax.Array | None, row_keys: jax.Array | None
  ) -> jax.Array:
    """(rows, length, emb_dim) to the same.

    Args:
      x: (rows, length, emb_dim) float.
      mask: see `MultiHeadAttention`.
      bias: likewise; None for biases of this layer's own.
      row_keys: (rows,) keys of dropout, or None for none.
    """
    cfg = self.config
    _, length, emb_dim = x.shape
    drop = draw_dropout(
      row_keys,
      cfg.dropout_rate,
      shapes={
        "weights": (cfg.num_heads, 1, length),
        "attention": (1, emb_dim),
        "hidden": (1, cfg.mlp_dim),
        "mlp": (1, emb_dim),
      },
      dtype=cfg.dtype,
    )
    if bias is None:
      bias = cfg.position_biases(bidirectional=True)(length)
    y = cfg.norm("pre_attention_layer_norm")(x)
    y = cfg.attention("attention")(y, y, mask=mask, bias=bias, weight_dropout=drop["weights"])
    x += y * drop["attention"]
    y = cfg.norm("pre_mlp_layer_norm")(x)
    y = cfg.mlp("mlp")(y, hidden_dropout=drop["hidden"])
    return constrain(x + y * drop["mlp"], "batch", "length", "embed")


class DecoderLayer(nn.Module):
  """Self-attention, attention to the encoder, and feed-forward block, each as in `EncoderLayer`."""

  config: EncoderDecoderConfig

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    encoded: jax.Array | None,
    *,
    mask: jax.Array,
    cross_mask: jax.Array,
    bias: jax.Array | None,
    row_keys: jax.Array | None,
    cache: CacheUse | None = None,
  ) -> jax.Array:
    """(rows, length, emb_dim) to the same.

    Args:
      x: as of `EncoderLayer`.
      encoded: (rows, encoder_length, emb_dim), or None where the cache has what is needed of it.
      mask: as of `EncoderLayer`.
      cross_mask: mask of the attention to `encoded`.
      bias: as of `EncoderLayer`.
      row_keys: likewise.
      cache: keys and values of tokens before; None for none.
    """
    cfg = self.config
    _, length, emb_dim = x.shape
    drop = draw_dropout(
      row_keys,
      cfg.dropout_rate,
      shapes={
        "weights": (cfg.num_heads, 1, length),
        "attention": (1, emb_dim),
        "cross_weights": (cfg.num_heads, 1, cross_mask.shape[-1]),
        "cross_attention": (1, emb_dim),
        "hidden": (1, cfg.mlp_dim),
        "mlp": (1, emb_dim),
      },
      dtype=cfg.dtype,
    )
    if bias is None:
      bias = cfg.decoder_biases(length, cache)
    y = cfg.norm("pre_self_attention_layer_norm")(x)
    attention = cfg.attention("self_attention")
    y = attention(y, y, mask=mask, bias=bias, weight_dropout=drop["weights"], cache=cache)
    x += y * drop["attention"]
    y = cfg.norm("pre_cross_attention_layer_norm")(x)
    attention = cfg.attention("encoder_decoder_attention", implementation=cfg.cross_attention_implementation)
    kept = None if cache is None else cache.of_encoder
    y = attention(y, encoded, mask=cross_mask, weight_dropout=drop["cross_weights"], cache=kept)
    x += y * drop["cross_attention"]
    y = cfg.norm("pre_mlp_layer_norm")(x)
    y = cfg.mlp("mlp")(y, hidden_dropout=drop["hidden"])
    return constrain(x + y * drop["mlp"], "batch", "length", "embed")


class Encoder(nn.Module):
  """The layers of the encoder, with one table of position biases for all."""

  config: T5Config

  @nn.compact
  def __call__(self, x: jax.Array, *, mask: jax.Array, row_keys: jax.Array | None) -> jax.Array:
    """(rows, length, emb_dim) embeddings to the same; mask as of `attention_mask`."""
    cfg = self.config
    _, length, emb_dim = x.shape
    *keys, end_keys = layer_keys(row_keys, stack=ENCODER, num_layers=cfg.num_encoder_layers)
    # T5's only dropout with a mask for each position is that after the encoder's last norm.
    ends = {"first": (1, emb_dim), "last": (length, emb_dim)}
    drop = draw_dropout(end_keys, cfg.dropout_rate, shapes=ends, dtype=cfg.dtype)
    bias = cfg.position_biases(bidirectional=True)(length)
    x *= drop["first"]
    for i in range(cfg.num_encoder_layers):
      x = EncoderLayer(cfg, name=f"layers_{i}")(x, mask=mask, bias=bias, row_keys=keys[i])
    return cfg.norm("encoder_norm")(x) * drop["last"]


class Decoder(nn.Module):
  """The layers of the decoder, with one table of position biases for all, and the logits."""

  config: T5Config

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    encoded: jax.Array | None,
    *,
    mask: jax.Array,
    cross_mask: jax.Array,
    embedding: Embedding,
    row_keys: jax.Array | None,
    cache: CacheUse | None = None,
  ) -> jax.Array:
    """From embeddings to logits.

    Args:
      x: (rows, length, emb_dim) float, embedded decoder inputs.
      encoded: (rows, encoder_length, emb_dim) float, what the encoder returned; None where the cache has
        what is needed of it.
      mask: (rows, 1, length, length) bool.
      cross_mask: (rows, 1, length, encoder_length) bool.
      embedding: the embedding table, for `logits_via_embedding`.
      row_keys: (rows,) keys of dropout, or None for none.
      cache: keys and values of tokens before; None for none.

    Returns:
      Logits, (rows, length, vocab_size) float32.
    """
    cfg = self.config
    _, length, emb_dim = x.shape
    *keys, end_keys = layer_keys(row_keys, stack=DECODER, num_layers=cfg.num_decoder_layers)
    ends = {"first": (1, emb_dim), "last": (1, emb_dim)}
    drop = draw_dropout(end_keys, cfg.dropout_rate, shapes=ends, dtype=cfg.dtype)
    bias = cfg.decoder_biases(length, cache)
    x *= drop["first"]
    for i in range(cfg.num_decoder_layers):
      layer = DecoderLayer(cfg, name=f"layers_{i}")
      x = layer(x, encoded, mask=mask, cross_mask=cross_mask, bias=bias, row_keys=keys[i], cache=cache)
    return cfg.logits(cfg.norm("decoder_norm")(x) * drop["last"], embedding)


class EncoderDecoder(nn.Module):
  """Encoder-decoder transformer: from the tokens of the encoder and of the teacher-forced decoder to logits.

  Token id 0 is padding. In packed rows the segment ids keep examples apart; positions within a segment
  are not needed, since T5 knows distances only. A family's `setup` makes `token_embedder`, `encoder` and
  `decoder`.
  """

  def __call__(
    self,
    encoder_input_tokens: jax.Array,
    decoder_input_tokens: jax.Array,
    *,
    decoder_target_tokens: jax.Array,
    encoder_segment_ids: jax.Array | None = None,
    decoder_segment_ids: jax.Array | None = None,
    row_keys: jax.Array | None = None,
  ) -> jax.Array:
    """Logits for every target, each from the targets before it.

    Args:
      encoder_input_tokens: (rows, encoder_length) int32.
      decoder_input_tokens: (rows, decoder_length) int32, the targets shifted right by one.
      decoder_target_tokens: (rows, decoder_length) int32, for the mask alone: where they are padding, so
        are the decoder's inputs.
      encoder_segment_ids: (rows, encoder_length) int32, for packed rows, 0 at padding.
      decoder_segment_ids: (rows, decoder_length) int32, the same; both or neither.
      row_keys: (rows,) JAX random keys of dropout, one for each row; None for no dropout.

    Returns:
      (rows, decoder_length, vocab_size) float32.
    """
    encoded = self.encode(encoder_input_tokens, encoder_segment_ids=encoder_segment_ids, row_keys=row_keys)
    return self.decode(
      encoded,
      decoder_input_tokens,
      encoder_input_tokens=encoder_input_tokens,
      decoder_target_tokens=decoder_target_tokens,
      encoder_segment_ids=encoder_segment_ids,
      decoder_segment_ids=decoder_segment_ids,
      row_keys=row_keys,
    )

  def encode(
    self,
    encoder_input_tokens: jax.Array,
    *,
    encoder_segment_ids: jax.Array | None = None,
    row_keys: jax.Array | None = None,
  ) -> jax.Array:
    """The encoder's half of `__call__`: (rows, encoder_length, emb_dim)."""
    valid = encoder_input_tokens > 0
    mask = attention_mask(valid, valid, query_segments=encoder_segment_ids, key_segments=encoder_segment_ids)
    return self.encoder(self.token_embedder(encoder_input_tokens), mask=mask, row_keys=row_keys)

  def decode(
    self,
    encoded: jax.Array,
    decoder_input_tokens: jax.Array,
    *,
    encoder_input_tokens: jax.Array,
    decoder_target_tokens: jax.Array,
    encoder_segment_ids: jax.Array | None = None,
    decoder_segment_ids: jax.Array | None = None,
    row_keys: jax.Array | None = None,
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
      embedding=self.token_embedder,
      row_keys=row_keys,
    )

  def prefill(self, encoder_input_tokens: jax.Array, *, length: int) -> None:
    """Fill the collections `cache`, with room for `length` tokens, and `encoded`; see `decode_step`.

    Args:
      encoder_input_tokens: (rows, encoder_length) int32.
      length: most tokens that the decoder is given.
    """
    valid_inputs = encoder_input_tokens > 0
    encoded = self.encoder(
      self.token_embedder(encoder_input_tokens, has_gradient=False),
      mask=attention_mask(valid_inputs, valid_inputs),
      row_keys=None,
    )
    # The first token, which the first step gives again, makes the arrays.
    first = jnp.zeros((encoded.shape[0], 1), jnp.int32)
    valid = jnp.ones(first.shape, bool)
    self.decoder(
      self.token_embedder(first, has_gradient=False),
      encoded,
      mask=attention_mask(valid, valid),
      cross_mask=attention_mask(valid, valid_inputs),
      embedding=self.token_embedder,
      row_keys=None,
      cache=Prefill(length=length),
    )

  def decode_step(
    self, tokens: jax.Array, positions: jax.Array, *, length: int, encoder_input_tokens: jax.Array
  ) -> jax.Array:
    """Logits of the tokens after these, from what `prefill` filled: (rows, vocab_size) float32.

    Args:
      tokens: (rows, 1) int32, one token of each row, its predecessors given before.
      positions: (rows,) int32, their positions.
      length: that of `prefill`.
      encoder_input_tokens: (examples, encoder_length) int32, those of `prefill`; the rows may be n decodes
        of each.
    """
    step = Step(positions=positions, length=length)
    decodes = jnp.ones(
      (encoder_input_tokens.shape[0], tokens.shape[0] // encoder_input_tokens.shape[0]), bool
    )
    logits = self.decoder(
      self.token_embedder(tokens, has_gradient=False),
      None,
      mask=step.mask,
      cross_mask=attention_mask(decodes, encoder_input_tokens > 0),
      embedding=self.token_embedder,
      row_keys=None,
      cache=step,
    )
    return logits[:, 0]


class Transformer(EncoderDecoder):
  """T5: from the tokens of the encoder and of the teacher-forced decoder to logits."""

  config: T5Config

  def setup(self):
    self.token_embedder = self.config.embedding()
    self.encoder = Encoder(self.config)
    self.decoder = Decoder(self.config)
