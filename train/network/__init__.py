"""T5.1.1, layer by layer (Raffel et al. 2020, https://arxiv.org/abs/1910.10683).

Linen modules alone; losses are `anystep.train.models`'.
"""

from anystep.train.network.t5 import T5Config, Transformer

__all__ = ["T5Config", "Transformer"]
