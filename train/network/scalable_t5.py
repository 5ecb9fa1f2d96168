"""Scalable T5, and umT5 (Chung et al. 2023, https://arxiv.org/abs/2304.09151): T5 made for scanned layers.

Another architecture than `t5`: every layer has position biases of its own, kernels of attention have an axis
of heads, and the parameters of all layers of a stack are one array, whose second axis counts the layers. Such
a program compiles in a time that does not grow with the number of layers. Names, shapes and logical axes of
the parameters are those of T5X's `examples/scalable_t5`.
"""

import dataclasses
from functools import partial
from typing import ClassVar

import jax
from flax import linen as nn

from anystep.train.decoding.key_value_cache import CacheUse
from anystep.train.network.config import EncoderDecoderConfig, ScannedConfig
from anystep.train.network.dropout import draw_dropout, layer_keys
from anystep.train.network.layers import Embedding
from anystep.train.network.t5 import DECODER, ENCODER, DecoderLayer, EncoderDecoder, EncoderLayer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalableT5Config(ScannedConfig, EncoderDecoderConfig):
  """Sizes of a scalable T5."""

  JOINED_KERNELS: ClassVar[bool] = False


class Encoder(nn.Module):
  """The layers of the encoder."""

  config: ScalableT5Config

  @nn.compact
  def __call__(self, x: jax.Array, *, mask: jax.Array, row_keys: jax.Array | None) -> jax.Array:
    """(rows, length, emb_dim) embeddings to the same; mask as of `attention_mask`."""
    cfg = self.config
    _, length, emb_dim = x.shape
    *keys, end_keys = layer_keys(row_keys, stack=ENCODER, num_layers=cfg.num_encoder_layers)
    # T5's only dropout with a mask for each position is that after the encoder's last norm.
    ends = {"first": (1, emb_dim), "last": (length, emb_dim)}
    drop = draw_dropout(end_keys, cfg.dropout_rate, shapes=ends, dtype=cfg.dtype)

    def apply(layer: EncoderLayer, x: jax.Array, row_keys: jax.Array | None) -> jax.Array:
      return layer(x, mask=mask, bias=None, row_keys=row_keys)

    x = cfg.apply_layers(apply, partial(EncoderLayer, cfg), x * drop["first"], keys, name="encoder")
    return cfg.norm("encoder_norm")(x) * drop["last"]


class Decoder(nn.Module):
  """The layers of the decoder, and the logits."""

  config: ScalableT5Config

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
    """From embeddings to logits, as `t5.Decoder`."""
    cfg = self.config
    *keys, end_keys = layer_keys(row_keys, stack=DECODER, num_layers=cfg.num_decoder_layers)
    ends = {"first": (1, cfg.emb_dim), "last": (1, cfg.emb_dim)}
    drop = draw_dropout(end_keys, cfg.dropout_rate, shapes=ends, dtype=cfg.dtype)

    def apply(layer: DecoderLayer, x: jax.Array, row_keys: jax.Array | None) -> jax.Array:
      return layer(x, encoded, mask=mask, cross_mask=cross_mask, bias=None, row_keys=row_keys, cache=cache)

    x = cfg.apply_layers(apply, partial(DecoderLayer, cfg), x * drop["first"], keys, name="decoder")
    return cfg.logits(cfg.norm("decoder_norm")(x) * drop["last"], embedding)


class ScalableTransformer(EncoderDecoder):
  """Scalable T5: from the tokens of the encoder and of the teacher-forced decoder to logits."""

  config: ScalableT5Config

  def setup(self):
    self.token_embedder = self.config.embedding()
    self.encoder = Encoder(self.config)
    self.decoder = Decoder(self.config)
