"""Optimizers, as optax transformations, and learning rates (docs/optimizers.md).

T5X's Adafactor and schedules, and what combines them with optax's own. The step that runs an optimizer is
`anystep.train.models`'; files are elsewhere.
"""

from anystep.lazy import lazy_names

__all__ = ["adafactor", "by_parameter", "chain", "learning_rate_schedule", "with_average"]

__getattr__ = lazy_names(
  __name__,
  {
    "adafactor": "adafactor_updates",
    "by_parameter": "parameter_groups",
    "chain": "logical_axes",
    "learning_rate_schedule": "learning_rates",
    "with_average": "parameter_average",
  },
)
