"""Networks: T5, scalable T5, decoder-only transformers and Llama, layer by layer.

Linen modules alone, and no losses: those are `anystep.train.models`'.
"""

from anystep.lazy import lazy_names

__all__ = [
  "DecoderConfig",
  "DecoderWrapper",
  "Llama",
  "LlamaConfig",
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
    "Llama": "llama",
    "LlamaConfig": "llama",
    "ScalableT5Config": "scalable_t5",
    "ScalableTransformer": "scalable_t5",
    "T5Config": "t5",
    "Transformer": "t5",
  },
)
