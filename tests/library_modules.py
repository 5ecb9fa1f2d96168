"""The modules of the library, by their names within `anystep`."""

import importlib.util
import pathlib

import anystep

_FOLDER = pathlib.Path(anystep.__file__).parent
MODULES = sorted(
  ".".join(path.relative_to(_FOLDER).with_suffix("").parts)
  for path in _FOLDER.rglob("*.py")
  if path.stem != "__init__"
  # PyTorch is in an environment of its own (`make test-torch`).
  and (path.stem != "torch" or importlib.util.find_spec("torch"))
)
