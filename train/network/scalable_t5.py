"""Scalable T5, and umT5 (Chung et al. 2023, https://arxiv.org/abs/2304.09151): T5 made for scanned layers.

Another architecture than `t5`: every layer has position biases of its own, kernels of attention have an axis
of heads, and the parameters of all layers of a stack are one array, whose second axis counts the layers. Such
a program compiles in a time that does not grow with the number of layers. Names, shapes and logical axes of
the parameters are those of T5X's `examples/scalable_t5`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from anystep.train.network.config import EncoderDecoderConfig
from anystep.train.network.dropout import draw_dropout, layer_keys
from anystep.train.network.layers import Embedding
from anystep.train.network.t5 import DECODER, ENCODER, DecoderLayer, EncoderDecoder, EncoderLayer

REMAT_POLICIES = ("none", "minimal", "full")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalableT5Config(EncoderDecoderConfig):
  """Sizes of a scalable T5.

  Attributes:
    remat_policy: what the backward pass computes again instead of keeping it: `none`; `minimal`, all but
      products with parameters; `full`, all of a layer.
    scan_layers: whether a stack is a loop over one layer; else its layers stand one after the other in the
      program, under the names layers_0, layers_1, ...
  """

  JOINED_KERNELS: ClassVar[bool] = False

  remat_policy: str = "none"
  scan_layers: bool = True

  def __post_init__(self):
    super().__post_init__()
    self.check_name("remat_policy", REMAT_POLICIES)


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

    x = _apply_layers(apply, EncoderLayer, cfg, x * drop["first"], keys, name="encoder")
    return cfg.norm("encoder_norm")(x) * drop["last"]


class Decoder(nn.Module):
  """The layers of the decoder, and the logits."""

  config: ScalableT5Config

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    encoded: jax.Array,
    *,
    mask: jax.Array,
    cross_mask: jax.Array,
    embedding: Embedding,
    row_keys: jax.Array | None,
  ) -> jax.Array:
    """From embeddings to logits, as `t5.Decoder`."""
    cfg = self.config
    *keys, end_keys = layer_keys(row_keys, stack=DECODER, num_layers=cfg.num_decoder_layers)
    ends = {"first": (1, cfg.emb_dim), "last": (1, cfg.emb_dim)}
    drop = draw_dropout(end_keys, cfg.dropout_rate, shapes=ends, dtype=cfg.dtype)

    def apply(layer: DecoderLayer, x: jax.Array, row_keys: jax.Array | None) -> jax.Array:
      return layer(x, encoded, mask=mask, cross_mask=cross_mask, bias=None, row_keys=row_keys)

    x = _apply_layers(apply, DecoderLayer, cfg, x * drop["first"], keys, name="decoder")
    return cfg.logits(cfg.norm("decoder_norm")(x) * drop["last"], embedding)


class ScalableTransformer(EncoderDecoder):
  """Scalable T5: from the tokens of the encoder and of the teacher-forced decoder to logits."""

  config: ScalableT5Config

  def setup(self):
    self.token_embedder = self.config.embedding()
    self.encoder = Encoder(self.config)
    self.decoder = Decoder(self.config)


def _apply_layers(
  apply: Callable[..., jax.Array],
  layer: Callable[..., Any],
  cfg: ScalableT5Config,
  x: jax.Array,
  keys: list[jax.Array | None],
  *,
  name: str,
) -> jax.Array:
  """Apply as many layers as there are keys, one after the other, as `scan_layers` and `remat_policy` say."""
  if cfg.remat_policy != "none":
    policies = {"minimal": jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims, "full": None}
    # In a loop XLA cannot merge the second computation with the first anyway.
    apply = nn.remat(apply, prevent_cse=not cfg.scan_layers, policy=policies[cfg.remat_policy])
  if not cfg.scan_layers:
    for i, row_keys in enumerate(keys):
      x = apply(layer(cfg, name=f"layers_{i}"), x, row_keys)
    return x
  scan = nn.scan(
    lambda module, x, row_keys: (apply(module, x, row_keys), None),
    variable_axes={"params": 1},
    split_rngs={"params": True},
    length=len(keys),
    metadata_params={nn.PARTITION_NAME: "layers"},
  )
  drawn_keys = [row_keys for row_keys in keys if row_keys is not None]
  x, _ = scan(layer(cfg, name=name), x, jnp.stack(drawn_keys) if drawn_keys else None)
  return x
