"""anystep: the batch of step t is a pure function of t."""

from pathlib import Path as _Path

# In a checkout tasks/, cache_job/, train/ and gin_configs/ stand beside anystep/; setup.py makes one
# package of them. A program started in the checkout finds this file first (Python puts the current
# directory on the path), so it must find the others as installed programs do.
_checkout = _Path(__file__).resolve().parents[1]
if not (_Path(__file__).parent / "tasks").is_dir() and (_checkout / "setup.py").is_file():
  __path__.append(str(_checkout))
