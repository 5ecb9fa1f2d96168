"""Configuration of a run's data in a gin file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from anystep.limits import MAX_BATCH_ROWS, are_feature_lengths, is_count, is_name
from anystep.order.packing import PackingPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetConfig:
  """Configuration of data and of its form.

  Attributes:
    mixture_or_task_name: a registered task or mixture, whose rates are its own; or a mixture of caches, as
      MaxText writes it: a JSON file, or `cache/a,0.3;cache/b,0.7`.
    task_feature_lengths: tokens per task feature that rows are cut and filled to.
    batch_size: rows of a batch, over all hosts.
    cache_dir: root or roots that `anystep-cache` wrote to; None where the name says it, or none are used.
    use_cached: whether to read caches. Without, files with random access are read in place, as exactly; of
      other sources examples come as SeqIO gives them, and no plan knows which.
    split: the split's name.
    seed: keys later epochs' order and the draws at reading.
    num_epochs: number of epochs after which the data ends; None for no end.
    epoch_policy: order of epochs: `reshuffle`, `same` or `global`; None for the default of the caches.
    packing: policy by which examples share a row: `none`, `greedy` or `best_fit`.
    module: module or modules to import, which register the task.
    prefetch_batches: batches made ahead in the background.
    plan: JSON file of a plan, made with `anystep-data plan`, that starts with this configuration and changes
      it later. None for no changes but those of the checkpoint.
  """

  mixture_or_task_name: str
  task_feature_lengths: Mapping[str, int]
  batch_size: int
  cache_dir: str | Sequence[str] | None = None
  use_cached: bool = True
  split: str = "train"
  seed: int = 0
  num_epochs: int | None = None
  epoch_policy: str | None = None
  packing: str = "none"
  module: str | Sequence[str] | None = None
  prefetch_batches: int = 16
  plan: str | None = None

  def __post_init__(self):
    counts = {
      "batch_size": is_count(self.batch_size, most=MAX_BATCH_ROWS),
      "seed": is_count(self.seed),
      "num_epochs": self.num_epochs is None or is_count(self.num_epochs, least=1),
      "prefetch_batches": is_count(self.prefetch_batches),
      "task_feature_lengths": are_feature_lengths(self.task_feature_lengths, least=1),
    }
    wrong = [f"{name}={getattr(self, name)!r}" for name, right in counts.items() if not right]
    if wrong:
      raise ValueError(f"expected whole numbers within docs/order.md's limits, got {', '.join(wrong)}")
    named = {"split": (self.split,), "cache_dir": self.cache_dirs, "module": self.modules}
    named["plan"] = () if self.plan is None else (self.plan,)
    for name, texts in named.items():
      if not all(map(is_name, texts)):
        raise ValueError(f"{name}: expected texts without control characters, got {getattr(self, name)!r}")
    packings = [policy.value for policy in PackingPolicy]
    if self.packing not in packings:
      raise ValueError(f"packing: expected {' or '.join(packings)}, got {self.packing!r}")
    if not isinstance(self.mixture_or_task_name, str):
      raise ValueError(f"mixture_or_task_name is a name, not {self.mixture_or_task_name!r}")
    if not isinstance(self.use_cached, bool):
      raise ValueError(f"use_cached is True or False, not {self.use_cached!r}")

  @property
  def cache_dirs(self) -> tuple[str, ...]:
    """Cache directories as a tuple."""
    if self.cache_dir is None:
      return ()
    return (self.cache_dir,) if isinstance(self.cache_dir, str) else tuple(self.cache_dir)

  @property
  def modules(self) -> tuple[str, ...]:
    """Modules as a tuple."""
    if self.module is None:
      return ()
    return (self.module,) if isinstance(self.module, str) else tuple(self.module)
