"""Reports of a run: the step log, metrics by step, and evaluations.

A metric that a task declares is computed in `anystep.tasks`; sums over a batch in `anystep.train.models`.
"""

from anystep.lazy import lazy_names

__all__ = ["JsonLinesWriter", "Profile", "TensorBoardWriter", "WandbWriter"]

__getattr__ = lazy_names(
  __name__,
  {
    "JsonLinesWriter": "metric_writers",
    "Profile": "profile",
    "TensorBoardWriter": "metric_writers",
    "WandbWriter": "metric_writers",
  },
)
