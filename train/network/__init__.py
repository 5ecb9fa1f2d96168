"""T5.1.1, layer by layer (Raffel et al. 2020, https://arxiv.org/abs/1910.10683).

Linen modules alone; losses are `anystep.train.models`'.
"""

from anystep.lazy import lazy_names

__all__ = ["T5Config", "Transformer"]

__getattr__ = lazy_names(__name__, {"T5Config": "t5", "Transformer": "t5"})
