"""Decoding: sequences from a function of one step, by sampling or beam search.

Pure functions of arrays, the cache that networks keep their keys and values in, and the fixed chunks that
examples are answered in. Networks and models belong elsewhere.
"""

from anystep.lazy import lazy_names

__all__ = [
  "BeamRules",
  "ChunkPlan",
  "DecodingState",
  "HuggingFaceBeams",
  "T5XBeams",
  "answer_chunks",
  "beam_search",
  "example_keys",
  "temperature_sample",
]

__getattr__ = lazy_names(
  __name__,
  {
    "BeamRules": "beam_rules",
    "ChunkPlan": "chunks",
    "DecodingState": "steps",
    "HuggingFaceBeams": "beam_rules",
    "T5XBeams": "beam_rules",
    "answer_chunks": "chunks",
    "beam_search": "beams",
    "example_keys": "keys",
    "temperature_sample": "sampling",
  },
)
