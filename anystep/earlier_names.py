"""Names that modules had in version 0.1.

Caches, plans and checkpoints name functions by their modules. So a module that moved keeps its earlier name
there. Modules that the documentation named, and those of the public classes, which users' functions capture
and pickles name, can still be imported by their earlier names.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Mapping, Sequence

# Earlier names by module.
_EARLIER: Mapping[str, str] = {
  "anystep.caches.cache": "anystep.cache",
  "anystep.caches.read_pool": "anystep.read_pool",
  "anystep.error_kinds.exit_codes": "anystep.errors",
  "anystep.features.converters": "anystep.converters",
  "anystep.features.digest": "anystep.digest",
  "anystep.features.ragged": "anystep.examples",
  "anystep.order.epochs": "anystep.epochs",
  "anystep.order.mixing": "anystep.mixing",
  "anystep.order.packing": "anystep.packing",
  "anystep.order.permutation": "anystep.permutation",
  "anystep.plans.plan": "anystep.plan",
  "anystep.plans.planned_task": "anystep.planned_task",
  "anystep.plans.segments": "anystep.segments",
  "anystep.plans.tombstones": "anystep.tombstones",
  "anystep.streams.grain": "anystep.grain_datasets",
  "anystep.streams.stream": "anystep.stream",
  "anystep.tasks.catalogue.arithmetic": "anystep.tasks.arithmetic",
  "anystep.tasks.catalogue.c4": "anystep.tasks.c4",
  "anystep.tasks.catalogue.copying": "anystep.tasks.copying",
  "anystep.tasks.catalogue.glue": "anystep.tasks.glue",
  "anystep.tasks.catalogue.stdlib": "anystep.tasks.stdlib",
  "anystep.tasks.catalogue.super_glue": "anystep.tasks.super_glue",
  "anystep.tasks.catalogue.text_to_text": "anystep.tasks.text_to_text",
  "anystep.tasks.catalogue.winograd": "anystep.tasks.winograd",
  "anystep.tasks.catalogue.wmt": "anystep.tasks.wmt",
  "anystep.tasks.seqio_api.converters": "anystep.tasks.converters",
  "anystep.tasks.seqio_api.deterministic_task": "anystep.tasks.deterministic_task",
  "anystep.tasks.sources.array_record_source": "anystep.tasks.array_record_source",
  "anystep.tasks.sources.arrow_rows": "anystep.tasks.arrow_rows",
  "anystep.tasks.sources.file_sources": "anystep.tasks.file_sources",
  "anystep.tasks.sources.held_out_source": "anystep.tasks.held_out_source",
  "anystep.tasks.sources.huggingface_source": "anystep.tasks.huggingface_source",
  "anystep.tasks.sources.in_place": "anystep.tasks.sources",
  "anystep.tasks.sources.numbered_source": "anystep.tasks.numbered_source",
  "anystep.tasks.sources.rows_source": "anystep.tasks.rows_source",
  "anystep.tasks.sources.tfds_source": "anystep.tasks.tfds_source",
  "anystep.tasks.vocabularies.hugging_face": "anystep.tasks.vocabularies",
  "anystep.train.models.encoder_decoder": "anystep.train.models",
  "anystep.train.models.losses": "anystep.train.losses",
  "anystep.train.network.attention": "anystep.train.attention",
  "anystep.train.network.dropout": "anystep.train.dropout",
  "anystep.train.network.layers": "anystep.train.layers",
  "anystep.train.network.relative_positions": "anystep.train.relative_positions",
  "anystep.train.network.t5": "anystep.train.network",
  "anystep.train.optimizers.adafactor_updates": "anystep.train.optimizers",
  "anystep.train.optimizers.learning_rates": "anystep.train.learning_rates",
  "anystep.train.runs.trainer": "anystep.train.trainer",
  "anystep.transforms.functions": "anystep.python_transforms",
  "anystep.transforms.transform": "anystep.transforms",
}
_CURRENT = {earlier: current for current, earlier in _EARLIER.items()}


def lasting_name(module: str) -> str:
  """Return the name of a module in caches, plans and checkpoints.

  >>> lasting_name("anystep.tasks.catalogue.glue"), lasting_name("my_tasks")
  ('anystep.tasks.glue', 'my_tasks')
  """
  return _EARLIER.get(module, module)


def list_earlier_names() -> list[str]:
  """Return the names that modules had in version 0.1 and can still be imported by."""
  return list(_CURRENT)


def make_importable() -> None:
  """Let `import` find modules by their earlier names too, unless another module has such a name."""
  sys.meta_path.append(_Finder())


class _Finder(importlib.abc.MetaPathFinder):
  """Finder of modules by their earlier names."""

  def find_spec(
    self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
  ) -> importlib.machinery.ModuleSpec | None:
    del path, target
    current = _CURRENT.get(fullname)
    return importlib.machinery.ModuleSpec(fullname, _Loader(current)) if current else None


class _Loader(importlib.abc.Loader):
  """Loader that returns the module of the current name."""

  def __init__(self, name: str):
    self._name = name

  def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
    del spec
    module = importlib.import_module(self._name)
    self._spec = module.__spec__
    return module

  def exec_module(self, module: types.ModuleType) -> None:
    # `import` has just replaced the module's spec by that of the earlier name.
    module.__spec__ = self._spec
