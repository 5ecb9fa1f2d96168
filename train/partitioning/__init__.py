"""Placement of arrays on devices: meshes, rules by logical axis, batches (GSPMD, Xu et al. 2021)."""

from anystep.lazy import lazy_names

__all__ = ["Partitioner", "standard_logical_axis_rules"]

__getattr__ = lazy_names(
  __name__,
  {"Partitioner": "partitioner", "standard_logical_axis_rules": "rules"},
)
