"""Models: a network with its loss, scores and optimizer, and the training step.

The loop, the data and files belong elsewhere.
"""

from anystep.lazy import lazy_names

__all__ = ["DecoderOnlyModel", "EncoderDecoderModel", "FlaxModel", "T5XMicrobatches", "WholeBatchGradients"]

__getattr__ = lazy_names(
  __name__,
  {
    "DecoderOnlyModel": "decoder_only",
    "EncoderDecoderModel": "encoder_decoder",
    "FlaxModel": "flax_modules",
    "T5XMicrobatches": "accumulation",
    "WholeBatchGradients": "accumulation",
  },
)
