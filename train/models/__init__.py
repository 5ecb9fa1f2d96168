"""A network with its loss, scores and optimizer: what a trainer trains, and the step that does so.

No loop, no data, no files.
"""

from anystep.lazy import lazy_names

__all__ = ["EncoderDecoderModel"]

__getattr__ = lazy_names(__name__, {"EncoderDecoderModel": "encoder_decoder"})
