"""Decoder-only transformers with T5's layers: language models and prefix language models.

Parameters have the names, shapes and logical axes of T5X's `examples/decoder_only`.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from anystep.train.decoding.key_value_cache import CacheUse, Prefill, Step
from anystep.train.network.attention import decoder_mask
from anystep.train.network.config import LayerConfig
from anystep.train.network.dropout import draw_dropout, layer_keys
from anystep.train.partitioning.rules import constrain


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(LayerConfig):
  """Sizes of a decoder-only transformer.

  Attributes:
    num_layers: number of layers.
  """

  num_layers: int = 6


class DecoderLayer(nn.Module):
  """Self-attention and feed-forward block, each normalised before and added to its input."""

  config: LayerConfig

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    *,
    mask: jax.Array,
    bias: jax.Array | None = None,
    rotate: Callable[[jax.Array], jax.Array] | None = None,
    row_keys: jax.Array | None,
    cache: CacheUse | None = None,
  ) -> jax.Array:
    """(rows, length, emb_dim) to the same; arguments as of `MultiHeadAttention`, and keys of dropout."""
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
    y = cfg.norm("pre_self_attention_layer_norm")(x)
    y = cfg.attention("self_attention")(
      y, y, mask=mask, bias=bias, weight_dropout=drop["weights"], rotate=rotate, cache=cache
    )
    x += y * drop["attention"]
    y = cfg.norm("pre_mlp_layer_norm")(x)
    y = cfg.mlp("mlp")(y, hidden_dropout=drop["hidden"])
    return constrain(x + y * drop["mlp"], "batch", "length", "embed")


class Decoder(nn.Module):
  """From tokens to logits, with one table of position biases for all layers."""

  config: DecoderConfig

  @nn.compact
  def __call__(
    self, tokens: jax.Array, *, mask: jax.Array, row_keys: jax.Array | None, cache: CacheUse | None = None
  ) -> jax.Array:
    """(rows, length) int32 to (rows, length, vocab_size) float32; mask as of `attention_mask`."""
    cfg = self.config
    *keys, end_keys = layer_keys(row_keys, stack=0, num_layers=cfg.num_layers)
    ends = {"first": (1, cfg.emb_dim), "last": (1, cfg.emb_dim)}
    drop = draw_dropout(end_keys, cfg.dropout_rate, shapes=ends, dtype=cfg.dtype)
    embedding = cfg.embedding("token_embedder")
    bias = cfg.decoder_biases(tokens.shape[1], cache)
    x = embedding(tokens, has_gradient=cache is None) * drop["first"]
    for i in range(cfg.num_layers):
      x = DecoderLayer(cfg, name=f"layers_{i}")(x, mask=mask, bias=bias, row_keys=keys[i], cache=cache)
    return cfg.logits(cfg.norm("decoder_norm")(x) * drop["last"], embedding)


class DecoderWrapper(nn.Module):
  """A decoder-only transformer, whose parameters stand below the name `decoder`.

  Token id 0 is padding. In packed rows the segment ids keep examples apart.
  """

  config: DecoderConfig

  def setup(self):
    self.decoder = Decoder(self.config)

  def __call__(
    self,
    decoder_input_tokens: jax.Array,
    *,
    decoder_target_tokens: jax.Array,
    decoder_segment_ids: jax.Array | None = None,
    decoder_causal_attention: jax.Array | None = None,
    row_keys: jax.Array | None = None,
  ) -> jax.Array:
    """Logits for every target, each from the targets before it.

    Args:
      decoder_input_tokens: (rows, length) int32, the targets shifted right by one.
      decoder_target_tokens: (rows, length) int32, for the mask alone: where they are padding, so are the
        inputs.
      decoder_segment_ids: (rows, length) int32, for packed rows, 0 at padding.
      decoder_causal_attention: (rows, length) int32, 1 on each example's prefix: the tokens that see all
        of the prefix, and not only what is before them. None for a causal model.
      row_keys: (rows,) JAX random keys of dropout, one for each row; None for no dropout.

    Returns:
      (rows, length, vocab_size) float32.
    """
    valid = decoder_target_tokens > 0
    mask = decoder_mask(valid, segments=decoder_segment_ids, causal_attention=decoder_causal_attention)
    return self.decoder(decoder_input_tokens, mask=mask, row_keys=row_keys)

  def prefill(
    self, prompts: jax.Array, *, length: int, decoder_causal_attention: jax.Array | None = None
  ) -> None:
    """Fill the collection `cache`, with room for `length` tokens, with the prompts' keys and values.

    Args:
      prompts: (rows, prompt_length) int32, the first token, the prompt, and padding.
      length: most tokens that the decoder is given, the prompts' too.
      decoder_causal_attention: as of `__call__`.
    """
    # Keys at padding come after all of the prompt, which does not see them, and steps replace them.
    mask = decoder_mask(jnp.ones(prompts.shape, bool), causal_attention=decoder_causal_attention)
    self.decoder(prompts, mask=mask, row_keys=None, cache=Prefill(length=length))

  def decode_step(self, tokens: jax.Array, positions: jax.Array, *, length: int) -> jax.Array:
    """Logits of the tokens after these, from what `prefill` filled: (rows, vocab_size) float32.

    Args:
      tokens: (rows, 1) int32, one token of each row; keys and values of those before it are in the cache.
      positions: (rows,) int32, their positions.
      length: that of `prefill`.
    """
    step = Step(positions=positions, length=length)
    return self.decoder(tokens, mask=step.mask, row_keys=None, cache=step)[:, 0]
