"""Keys and values that a decoder keeps from one token to the next.

A network is called with a `Prefill` once, and with a `Step` for each token after it. Self-attention keeps
its keys and values in the collection `cache`; what attention to an encoder keeps is in the collection
`encoded`, which no step changes. Arrays are (rows, length, heads, head_dim), by key and value heads; with
scanned layers (rows, layers, length, heads, head_dim).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import linen as nn

from anystep.train.decoding.steps import write_at
from anystep.train.partitioning.rules import constrain

CACHE, ENCODED = "cache", "encoded"
KeysValues = tuple[jax.Array, jax.Array]


class KeptKeysValues(Protocol):
  """Use of the keys and values of an attention, in one call after the other."""

  def extend(self, module: nn.Module, project: Callable[[], KeysValues]) -> KeysValues:
    """Return keys and values that the queries of a call see, and keep what later calls need.

    Args:
      module: the attention that keeps them.
      project: computes the call's own keys and values, (rows, tokens, heads, head_dim) each.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill:
  """A call with the tokens at positions 0 to n - 1.

  Attributes:
    length: number of positions that the cache has room for, at least n.
  """

  length: int

  def extend(self, module: nn.Module, project: Callable[[], KeysValues]) -> KeysValues:
    """See `KeptKeysValues`: the call's own."""
    key, value = project()
    room = ((0, 0), (0, self.length - key.shape[1]), (0, 0), (0, 0))
    _put(module, CACHE, (jnp.pad(key, room), jnp.pad(value, room)))
    return key, value

  @property
  def of_encoder(self) -> KeptKeysValues:
    """The same of attention to an encoder."""
    return _KeepEncoded()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
  """A call with one token of each row.

  Attributes:
    positions: (rows,) int32, the tokens' positions, from 0. One beyond the cache is not kept.
    length: number of positions that the cache has room for.
  """

  positions: jax.Array
  length: int

  def extend(self, module: nn.Module, project: Callable[[], KeysValues]) -> KeysValues:
    """See `KeptKeysValues`: those of all positions, of which `mask` says which there are."""
    key, value = project()
    kept_key, kept_value = _get(module, CACHE)
    key = write_at(kept_key, key[:, 0], self.positions)
    return _put(module, CACHE, (key, write_at(kept_value, value[:, 0], self.positions)))

  @property
  def of_encoder(self) -> KeptKeysValues:
    """The same of attention to an encoder."""
    return _UseEncoded()

  @property
  def mask(self) -> jax.Array:
    """Positions that each row's token sees, those before it and its own: (rows, 1, 1, length) bool."""
    return (jnp.arange(self.length)[None, :] <= self.positions[:, None])[:, None, None, :]


CacheUse = Prefill | Step


class _KeepEncoded:
  """Keeps the keys and values of an encoder's outputs."""

  def extend(self, module: nn.Module, project: Callable[[], KeysValues]) -> KeysValues:
    return _put(module, ENCODED, project())


class _UseEncoded:
  """Returns what `_KeepEncoded` kept, of an example's row for all its decodes."""

  def extend(self, module: nn.Module, project: Callable[[], KeysValues]) -> KeysValues:
    return _get(module, ENCODED)


def _get(module: nn.Module, collection: str) -> KeysValues:
  keys: Any = module.get_variable(collection, "keys")
  values: Any = module.get_variable(collection, "values")
  assert keys is not None, f"a Prefill comes before a Step, and its {collection} is passed on"
  return keys, values


def _put(module: nn.Module, collection: str, keys_values: KeysValues) -> KeysValues:
  keys, values = (constrain(array, "batch", "length", "heads", "kv") for array in keys_values)
  module.put_variable(collection, "keys", keys)
  module.put_variable(collection, "values", values)
  return keys, values
