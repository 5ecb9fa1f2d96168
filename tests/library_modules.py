"""The modules of the library, by their names within `anystep`."""

import pathlib

import anystep

_FOLDER = pathlib.Path(anystep.__file__).parent
MODULES = sorted(
  ".".join(path.relative_to(_FOLDER).with_suffix("").parts)
  for path in _FOLDER.rglob("*.py")
  if path.stem != "__init__"
)
