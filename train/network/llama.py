"""Llama (Touvron et al. 2023, https://arxiv.org/abs/2302.13971): a decoder as language models have it today.

RMS norms, rotary positions, grouped-query attention and SwiGLU, without any biases. Layers, names and
logical axes are those of `decoder_only`, with an axis for heads as in `scalable_t5`. Parameters of scanned
layers are one array, whose second axis counts the layers. Numbers are those of Hugging Face's Llama.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from anystep.limits import is_number
from anystep.train.decoding.key_value_cache import CacheUse, Prefill, Step
from anystep.train.network.attention import MultiHeadAttention, decoder_mask
from anystep.train.network.config import ScannedConfig
from anystep.train.network.decoder_only import DecoderLayer
from anystep.train.network.dropout import draw_dropout, layer_keys
from anystep.train.network.layers import Embedding, RMSNorm, dense
from anystep.train.network.relative_positions import make_rotation, rotary_frequencies
from anystep.train.partitioning.rules import constrain


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(ScannedConfig):
  """Sizes and choices of a Llama; defaults are Llama 3's.

  Attributes:
    num_layers: number of layers.
    num_kv_heads: number of heads of keys and values, which divides num_heads; as many for plain attention.
    norm_epsilon: see `RMSNorm`.
    rope_theta: base of the rotary positions, see `rotary_frequencies`.
    rope_scaling_factor: factor by which Llama 3.1 and later extend the context; 1.0 for none.
    rope_low_freq_factor: see `rotary_frequencies`, of the scaling alone.
    rope_high_freq_factor: likewise.
    rope_original_length: likewise, in tokens.

  Raises:
    ValueError: num_kv_heads does not divide num_heads, head_dim is odd, or a number is out of its range.
  """

  JOINED_KERNELS: ClassVar[bool] = False
  LEARNED_BIASES: ClassVar[bool] = False

  mlp_activations: Sequence[str] = ("silu", "linear")
  num_layers: int = 6
  num_kv_heads: int = 6
  norm_epsilon: float = 1e-5
  rope_theta: float = 500_000.0
  rope_scaling_factor: float = 1.0
  rope_low_freq_factor: float = 1.0
  rope_high_freq_factor: float = 4.0
  rope_original_length: int = 8192

  def __post_init__(self):
    super().__post_init__()
    for name, least in [("norm_epsilon", 0.0), ("rope_theta", 1.0), ("rope_scaling_factor", 1.0)]:
      value = getattr(self, name)
      if not is_number(value, least=least):
        raise ValueError(f"{self._of(name)}: expected a number of at least {least}, got {value!r}")
    factors = (self.rope_low_freq_factor, self.rope_high_freq_factor)
    if not (all(is_number(factor, least=0.0) for factor in factors) and factors[0] < factors[1]):
      raise ValueError(f"{self._of('rope_high_freq_factor')}: expected more than the low one, got {factors}")
    if self.num_heads % self.num_kv_heads:
      expected = f"a divisor of the {self.num_heads} heads"
      raise ValueError(f"{self._of('num_kv_heads')}: expected {expected}, got {self.num_kv_heads}")
    if self.head_dim % 2:
      raise ValueError(f"{self._of('head_dim')}: expected an even number, got {self.head_dim}")

  @property
  def rotary_frequencies(self) -> np.ndarray:
    """Angles of the rotary positions, (head_dim / 2,) float32."""
    return rotary_frequencies(
      self.head_dim,
      theta=self.rope_theta,
      scaling_factor=self.rope_scaling_factor,
      low_freq_factor=self.rope_low_freq_factor,
      high_freq_factor=self.rope_high_freq_factor,
      original_length=self.rope_original_length,
    )

  def attention(self, name: str, *, implementation: str | None = None, **choices: Any) -> MultiHeadAttention:
    """Return grouped-query attention with these sizes."""
    choices = {"num_kv_heads": self.num_kv_heads, "divided_logits": True} | choices
    return super().attention(name, implementation=implementation, **choices)

  def norm(self, name: str) -> RMSNorm:
    """Return a norm of this dtype and epsilon."""
    return RMSNorm(dtype=self.dtype, epsilon=self.norm_epsilon, name=name)

  def embedding(self, name: str | None = None, **choices: Any) -> Embedding:
    """Return the table of embeddings, with which logits that come from it begin near 1."""
    return super().embedding(name, **{"init_stddev": self.emb_dim**-0.5} | choices)

  def logits(self, x: jax.Array, embedding: Embedding) -> jax.Array:
    """Return the logits of a stack's outputs, products of `dtype` that are summed in float32.

    Those from the table of embeddings are not divided, unlike T5's.
    """
    if self.logits_via_embedding:
      table = embedding.embedding.astype(self.dtype)
      logits = jnp.einsum("...e,ve->...v", x, table, preferred_element_type=jnp.float32)
    else:
      kernel = dense(
        self.vocab_size, ("embed", "vocab"), name="logits_dense", dtype=self.dtype, sum_dtype=jnp.float32
      )
      logits = kernel(x)
    return constrain(logits, "batch", "length", "vocab")


class Decoder(nn.Module):
  """From tokens to logits."""

  config: LlamaConfig

  @nn.compact
  def __call__(
    self,
    tokens: jax.Array,
    *,
    mask: jax.Array,
    positions: jax.Array,
    row_keys: jax.Array | None,
    cache: CacheUse | None = None,
  ) -> jax.Array:
    """(rows, length) int32 to (rows, length, vocab_size) float32; positions are (rows or 1, length) int32."""
    cfg = self.config
    *keys, end_keys = layer_keys(row_keys, stack=0, num_layers=cfg.num_layers)
    ends = {"first": (1, cfg.emb_dim), "last": (1, cfg.emb_dim)}
    drop = draw_dropout(end_keys, cfg.dropout_rate, shapes=ends, dtype=cfg.dtype)
    embedding = cfg.embedding("token_embedder")
    rotate = make_rotation(positions, cfg.rotary_frequencies)

    def apply(layer: DecoderLayer, x: jax.Array, row_keys: jax.Array | None) -> jax.Array:
      return layer(x, mask=mask, rotate=rotate, row_keys=row_keys, cache=cache)

    x = embedding(tokens, has_gradient=cache is None) * drop["first"]
    x = cfg.apply_layers(apply, partial(DecoderLayer, cfg), x, keys, name="layers")
    return cfg.logits(cfg.norm("decoder_norm")(x) * drop["last"], embedding)


class Llama(nn.Module):
  """A Llama, whose parameters stand below the name `decoder`.

  Token id 0 is padding, but in packed rows, where segment ids keep examples apart and 0 is padding's.
  """

  config: LlamaConfig

  def setup(self):
    self.decoder = Decoder(self.config)

  def __call__(
    self,
    decoder_input_tokens: jax.Array,
    *,
    decoder_target_tokens: jax.Array,
    decoder_segment_ids: jax.Array | None = None,
    decoder_positions: jax.Array | None = None,
    decoder_causal_attention: jax.Array | None = None,
    row_keys: jax.Array | None = None,
  ) -> jax.Array:
    """Logits for every target, each from the targets before it.

    Args:
      decoder_input_tokens: (rows, length) int32, the targets shifted right by one.
      decoder_target_tokens: (rows, length) int32, for the mask of rows that are not packed alone: where they
        are padding, so are the inputs.
      decoder_segment_ids: (rows, length) int32, for packed rows, 0 at padding.
      decoder_positions: (rows, length) int32, for packed rows, the place of each token in its example;
        None for the place in the row.
      decoder_causal_attention: see `DecoderWrapper`.
      row_keys: (rows,) JAX random keys of dropout, one for each row; None for no dropout.

    Returns:
      (rows, length, vocab_size) float32.
    """
    # In packed rows an id 0 may be a token.
    valid = (decoder_target_tokens if decoder_segment_ids is None else decoder_segment_ids) > 0
    mask = decoder_mask(valid, segments=decoder_segment_ids, causal_attention=decoder_causal_attention)
    if decoder_positions is None:
      decoder_positions = jnp.arange(decoder_input_tokens.shape[1], dtype=jnp.int32)[None]
    return self.decoder(decoder_input_tokens, mask=mask, positions=decoder_positions, row_keys=row_keys)

  def prefill(
    self, prompts: jax.Array, *, length: int, decoder_causal_attention: jax.Array | None = None
  ) -> None:
    """See `DecoderWrapper.prefill`."""
    mask = decoder_mask(jnp.ones(prompts.shape, bool), causal_attention=decoder_causal_attention)
    positions = jnp.arange(prompts.shape[1], dtype=jnp.int32)[None]
    self.decoder(prompts, mask=mask, positions=positions, row_keys=None, cache=Prefill(length=length))

  def decode_step(self, tokens: jax.Array, positions: jax.Array, *, length: int) -> jax.Array:
    """See `DecoderWrapper.decode_step`."""
    step = Step(positions=positions, length=length)
    return self.decoder(tokens, mask=step.mask, positions=positions[:, None], row_keys=None, cache=step)[:, 0]
