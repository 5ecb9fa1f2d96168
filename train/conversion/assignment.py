"""Rules that say which saved leaf a model's leaf is read from: T5X's assignment maps."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence

from anystep.errors import AnystepError, ExitCode, find_nearest

Rules = Sequence[tuple[str, str | None]]
# Templates are names, which have no commas; expressions may have some.
_RULE = re.compile(r"(.+?)=>([^,]*)(?:,|\Z)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
  """Sources of a model's leaves.

  Attributes:
    sources: the name of the saved leaf by the name of each leaf that has one.
    fresh: leaves that have none, or that a rule drops.
    overridden: leaves for which a rule has no effect: the checkpoint has a leaf of this name that nothing
      else reads.
    unread: saved leaves that nothing reads.
  """

  sources: dict[str, str]
  fresh: list[str]
  overridden: list[str]
  unread: list[str]


def check_rules(rules: Rules) -> None:
  """Refuse rules that are no pairs of an expression and a template.

  Raises:
    AnystepError: 78 `assignment`.
  """
  for rule in rules:
    is_pair = isinstance(rule, (tuple, list)) and len(rule) == 2 and isinstance(rule[0], str)
    if not is_pair or not (rule[1] is None or isinstance(rule[1], str)):
      raise _assignment_error("pairs of a regular expression and a template or None", rule)
    try:
      pattern = re.compile(rule[0])
      if rule[1] is not None:
        re._parser.parse_template(rule[1], pattern)  # type: ignore[attr-defined]
    except (re.error, IndexError) as error:
      raise _assignment_error(
        "a regular expression and a template of its groups", f"{rule}: {error}"
      ) from error


def parse_rules(text: str) -> Rules:
  r"""Parse rules of a command line; an empty template stands for None.

  Raises:
    AnystepError: 78 `assignment`.

  >>> parse_rules(r"target/(.*)/a=>target/\1/b,state.*=>")
  [('target/(.*)/a', 'target/\\1/b'), ('state.*', None)]
  """
  rules: list[tuple[str, str | None]] = []
  place = 0
  while place < len(text):
    match = _RULE.match(text, place)
    if match is None:
      raise _assignment_error("REGEX=>NAME", text[place:])
    rules.append((match[1], match[2] or None))
    place = match.end()
  check_rules(rules)
  return rules


def assign(model_names: Collection[str], saved_names: Collection[str], rules: Rules) -> Assignment:
  r"""Find the saved leaf of each of a model's leaves, as T5X does.

  The first rule whose expression matches a leaf's whole name counts: its template, with the groups of the
  match, names the saved leaf, and None drops the leaf. A saved leaf that no rule reads keeps its name, and so
  wins over a rule for the leaf of that name. Other leaves are read by their own names.

  Args:
    model_names: names of the model's leaves.
    saved_names: names of the checkpoint's.
    rules: pairs of a regular expression and a template.

  Raises:
    AnystepError: 78 `assignment` for a rule that matches nothing, or names a leaf that is not saved.

  >>> assign(["a/1", "a/2"], ["a/1"], [("a/2", "a/1")]).sources
  {'a/2': 'a/1', 'a/1': 'a/1'}
  >>> assign(["a/1", "a/2"], ["a/1", "a/2"], [("a/2", "a/1")]).overridden
  ['a/2']
  """
  by_rule: dict[str, str] = {}
  dropped: set[str] = set()
  used = set()
  for name in model_names:
    rule, match = _first_match(name, rules)
    if match is None:
      continue
    used.add(rule[0])
    if rule[1] is None:
      dropped.add(name)
      continue
    source = match.expand(rule[1])
    if source not in saved_names:
      nearest = find_nearest(source, saved_names)
      raise _assignment_error(f"a leaf of the checkpoint, such as {nearest}", f"{source} for {name}")
    by_rule[name] = source
  _check_used(rules, used)
  read_by_rules = set(by_rule.values())
  kept = {name: name for name in saved_names if name not in read_by_rules and name not in dropped}
  sources = by_rule | {name: name for name in model_names if name in kept}
  for name in model_names:
    if name not in sources and name not in dropped and name in saved_names:
      sources[name] = name
  return Assignment(
    sources=sources,
    fresh=sorted(set(model_names) - sources.keys()),
    overridden=sorted(name for name, source in by_rule.items() if sources[name] != source),
    unread=sorted(set(saved_names) - set(sources.values())),
  )


def rename(saved_names: Collection[str], rules: Rules) -> dict[str, str]:
  """Return the saved leaf by the name under which a conversion writes it.

  Here the first rule whose expression matches a *saved* name counts: its template is the new name, and None
  leaves the leaf out. There is no model that would say which names there should be.

  Raises:
    AnystepError: 78 `assignment` for a rule that matches nothing, gives two leaves one name, or a name that
      no tree of leaves has.

  >>> rename(["a/1", "a/2", "b"], [("a/(.*)", r"c/\\1"), ("b", None)])
  {'c/1': 'a/1', 'c/2': 'a/2'}
  """
  sources: dict[str, str] = {}
  used = set()
  for name in saved_names:
    rule, match = _first_match(name, rules)
    if match is not None:
      used.add(rule[0])
    new_name = name if match is None else None if rule[1] is None else match.expand(rule[1])
    if new_name is None:
      continue
    if new_name in sources:
      raise _assignment_error("one leaf of each name", f"{sources[new_name]} and {name} as {new_name}")
    sources[new_name] = name
  _check_used(rules, used)
  _check_names(sources)
  return sources


def _check_names(names: Collection[str]) -> None:
  """Refuse names that no tree of leaves has: an empty part, a leaf inside another, two of one stored name."""
  # Orbax stores a leaf by its parts with dots between them.
  stored: dict[str, str] = {}
  for name in names:
    parts = name.split("/")
    if not all(parts):
      raise _assignment_error("names without empty parts", name)
    for end in range(1, len(parts)):
      if (outer := "/".join(parts[:end])) in names:
        raise _assignment_error("a leaf or leaves below it", f"{outer} and {name}")
    other = stored.setdefault(name.replace("/", "."), name)
    if other != name:
      raise _assignment_error("names that differ in more than dots and slashes", f"{other} and {name}")


def _first_match(name: str, rules: Rules) -> tuple[tuple[str, str | None], re.Match[str] | None]:
  matches = ((rule, re.fullmatch(rule[0], name)) for rule in rules)
  return next(((rule, match) for rule, match in matches if match), (("", None), None))


def _check_used(rules: Rules, used: Collection[str]) -> None:
  unused = [pattern for pattern, _ in rules if pattern not in used]
  if unused:
    raise _assignment_error("rules that match the whole name of some leaf", ", ".join(unused))


def _assignment_error(expected: str, got: object) -> AnystepError:
  return AnystepError(
    ExitCode.CONFIG,
    "assignment",
    expected=expected,
    got=got,
    fix="correct the rule: anystep-convert --dry_run lists a checkpoint's leaves",
  )
