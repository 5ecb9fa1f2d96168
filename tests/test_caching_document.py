"""docs/caching.md names every flag of the program."""

import pathlib
import re

import pytest

from anystep.cache_job.main import define_flags, main

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCUMENT = (ROOT / "docs" / "caching.md").read_text()


def test_help_has_examples(capsys):
  with pytest.raises(SystemExit):
    main(["anystep-cache", "--help"])
  _, _, examples = capsys.readouterr().out.partition("\nexamples:\n")
  lines = [line.split() for line in examples.splitlines()]
  assert len(lines) >= 3
  for program, *words in lines:
    assert program == "anystep-cache"
    assert {word.partition("=")[0].removeprefix("--") for word in words} <= set(define_flags())


def test_every_flag_has_a_row_with_its_default_and_no_other_has():
  rows = [line.split(" | ") for line in DOCUMENT.splitlines() if line.startswith("| `--")]
  documented = {name: row[1] for row in rows for name in re.findall(r"`--(\w+)`", row[0])}
  values = define_flags()
  flags = {name: values[name] for name in values if values[name].help and not values[name].boolean}
  switches = {name: values[name] for name in values if values[name].boolean}
  own = {name: flag for name, flag in {**flags, **switches}.items() if name not in ("flagfile", "undefok")}
  assert documented.keys() == own.keys()
  for name, flag in own.items():
    if flag.default and name != "module_import":
      shown = flag.default[0] if isinstance(flag.default, list) else flag.default
      assert (str(shown).lower() if flag.boolean else str(shown)) in documented[name]
