"""Names of the library's converters, under which files and flags know them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from anystep.features.converters import (
  DecoderConverter,
  EncoderConverter,
  EncoderDecoderConverter,
  FeatureConverter,
  LMConverter,
  MaxTextConverter,
  PassThroughConverter,
  PrefixLMConverter,
)
from anystep.limits import is_count, refuse_wrong

CONVERTERS: Mapping[str, Callable[..., FeatureConverter]] = {
  "encoder_decoder": EncoderDecoderConverter,
  "decoder": DecoderConverter,
  "prefix_lm": PrefixLMConverter,
  "lm": LMConverter,
  "encoder": EncoderConverter,
  "maxtext": MaxTextConverter,
  "pass_through": PassThroughConverter,
}
"""Converters by the name of the model whose features they make."""

_VERSION = 1
# Token ids are int32.
_MAX_TOKEN_ID = (1 << 31) - 1


def name_of(converter: FeatureConverter) -> str | None:
  """Return the name of a converter; None for one that is not this library's."""
  return next((name for name, made in CONVERTERS.items() if type(converter) is made), None)


def converter_to_json(converter: FeatureConverter) -> dict[str, Any]:
  """Return a converter's name and arguments as a JSON object; for others than this library's, their class.

  >>> converter_to_json(EncoderDecoderConverter(bos_id=3))
  {'version': 1, 'model': 'encoder_decoder', 'arguments': {'bos_id': 3}}
  """
  name = name_of(converter)
  if name is None:
    kind = type(converter)
    return {"version": _VERSION, "model": None, "class": f"{kind.__module__}.{kind.__qualname__}"}
  arguments = {argument: getattr(converter, argument) for argument in _argument_types(name)}
  return {"version": _VERSION, "model": name, "arguments": arguments}


def converter_from_json(document: Any) -> FeatureConverter | None:
  """Return the converter of an object that `converter_to_json` returned; None where it is not this library's.

  Raises:
    ValueError, TypeError, KeyError: for any other object.
  """
  refuse_wrong(version=type(document["version"]) is int and document["version"] == _VERSION)
  name = document["model"]
  if name is None:
    refuse_wrong(**{"class": isinstance(document["class"], str)})
    return None
  refuse_wrong(model=isinstance(name, str) and name in CONVERTERS)
  arguments, types = document["arguments"], _argument_types(name)
  refuse_wrong(
    arguments=isinstance(arguments, dict)
    and arguments.keys() == types.keys()
    and all(type(value) is types[argument] for argument, value in arguments.items())
    and all(is_count(int(value), most=_MAX_TOKEN_ID) for value in arguments.values())
  )
  return CONVERTERS[name](**arguments)


def _argument_types(name: str) -> dict[str, type]:
  """Return the types of a converter's arguments, which are its attributes too, by name."""
  parameters = inspect.signature(CONVERTERS[name]).parameters
  return {argument: bool if "bool" in str(p.annotation) else int for argument, p in parameters.items()}


def task_feature_of(converter: FeatureConverter, name: str) -> str | None:
  """Return the task's feature whose tokens a model's feature has; None for masks, positions and weights.

  >>> task_feature_of(EncoderDecoderConverter(), "encoder_input_tokens")
  'inputs'
  """
  if isinstance(converter, PassThroughConverter):
    return name
  if isinstance(converter, MaxTextConverter):
    return "targets" if name in ("inputs", "targets") else None
  if not name.endswith("_tokens"):
    return None
  return "inputs" if name == "encoder_input_tokens" else "targets"
