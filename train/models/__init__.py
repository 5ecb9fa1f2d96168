"""A network with its loss, scores and optimizer: what a trainer trains, and the step that does so.

No loop, no data, no files.
"""

from anystep.train.models.encoder_decoder import EncoderDecoderModel

__all__ = ["EncoderDecoderModel"]
