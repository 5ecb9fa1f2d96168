"""Networks: T5, scalable T5, and decoder-only transformers, layer by layer.

Linen modules alone, and no losses: those are `anystep.train.models`'.
"""

from anystep.lazy import lazy_names

__all__ = [
  "DecoderConfig",
  "DecoderWrapper",
  "ScalableT5Config",
  "ScalableTransformer",
  "T5Config",
  "Transformer",
]

__getattr__ = lazy_names(
  __name__,
  {
    "DecoderConfig": "decoder_only",
    "DecoderWrapper": "decoder_only",
    "ScalableT5Config": "scalable_t5",
    "ScalableTransformer": "scalable_t5",
    "T5Config": "t5",
    "Transformer": "t5",
  },
)
