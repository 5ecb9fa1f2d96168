"""The arguments of `anystep-data` that name examples: by index, by source and place, or by a list."""

from __future__ import annotations

import argparse

from anystep.caches.cache import Cache
from anystep.errors import find_nearest
from anystep.inspection.rows import index_of_source
from anystep.tasks.data_program.arguments import check_within, usage_error, wrong_value_error

# No number of a source shard has as many; Python refuses to read a number of thousands.
_NUMBER_DIGITS = 20


def add_example_flags(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
  """Flags that say which examples of a task; returns the group of those of which one is needed."""
  examples = parser.add_mutually_exclusive_group(required=True)
  text = "an example's index in its task's cache; may be repeated"
  examples.add_argument("--index", type=int, action="append", help=text)
  examples.add_argument("--source", metavar="NAME_OR_NUMBER", help="its source shard, with --place")
  text = "its place among its source shard's examples; may be repeated"
  parser.add_argument("--place", type=int, action="append", help=text)
  return examples


def find_example_indices(arguments: argparse.Namespace, cache: Cache) -> list[int]:
  """The indices of the examples that the flags name.

  Raises:
    AnystepError: 64 `index`, `source`, `place` where there is none; `arguments`.
  """
  m = cache.manifest
  if arguments.index is not None:
    if arguments.place is not None:
      raise usage_error("--place and --index", "leave one out: --place belongs to --source")
    return [check_within("index", index, m.num_examples) for index in arguments.index]
  if arguments.place is None:
    raise usage_error("--source without --place", "add --place, the example's number in its source shard")
  named = [k for k, shard in enumerate(m.source_shards) if shard.name == arguments.source]
  if len(named) > 1:
    raise wrong_value_error("source", f"one of the numbers {named} that have this name", arguments.source)
  if not named and not (arguments.source.isdecimal() and len(arguments.source) <= _NUMBER_DIGITS):
    raise wrong_value_error(
      "source", find_nearest(arguments.source, {shard.name for shard in m.source_shards}), arguments.source
    )
  source_shard = named[0] if named else check_within("source", int(arguments.source), len(m.source_shards))
  num_places = m.source_shards[source_shard].examples
  places = [check_within("place", place, num_places) for place in arguments.place]
  return [index_of_source(cache, source_shard, place) for place in places]
