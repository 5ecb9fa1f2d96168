"""Two programs on one directory: what has a lock lets one in, everything else ends up whole.

The first is held at one of its file operations while the second runs to its end.
"""

import random
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fault_cases import CASES
from fault_runs import Fault, zygote

_WAIT_SECONDS = 120
# By case, how often the soak tries.
PAIRS = {
  "a cache": 300,
  "a training run": 60,
  "a unit table": 300,
  "a changed plan": 300,
}
SLOW = ("a cache", "a training run")


@pytest.fixture(
  scope="module", params=[pytest.param(name, marks=[pytest.mark.long] * (name in SLOW)) for name in PAIRS]
)
def started(request, tmp_path_factory):
  """The name of a case, the case, the program that runs it, and an undisturbed run's end and operations."""
  folder = tmp_path_factory.mktemp("undisturbed")
  case = CASES[request.param](folder)
  with zygote(*case.imports) as programs:
    end = folder / "end"
    case.begin(end)
    ended = programs.run(case.run(end))
    assert ended.status == 0, ended.stderr
    yield request.param, case, programs, end, ended.operations


@pytest.mark.parametrize(
  "pairs", [pytest.param(2, id="sample"), pytest.param(0, id="all", marks=pytest.mark.soak)]
)
def test_of_two_programs_on_a_directory_one_works_or_both_leave_the_same(started, pairs, tmp_path, capsys):
  name, case, programs, end, operations = started
  chance, refused = random.Random(name), 0
  first, last = _locked(case, operations)
  for number in range(pairs or PAIRS[name]):
    place = chance.randrange(first, last)
    root, hold = tmp_path / f"root{number}", tmp_path / f"hold{number}"
    case.begin(root)
    with ThreadPoolExecutor(1) as pool:
      holder = pool.submit(programs.run, case.run(root, fault=Fault(at=place, hold=hold)))
      try:
        _wait_for(hold, holder)
        was_complete = case.is_complete(root)
        second = programs.run(case.run(root))
      finally:
        hold.unlink(missing_ok=True)
      held = holder.result(_WAIT_SECONDS)
    assert held.struck, place
    assert held.status == 0, (held.struck, held.stderr)
    # What is complete keeps nobody out.
    if case.locked and not (was_complete and second.status == 0):
      assert second.status == 73, (held.struck, second.stderr)
      assert re.match(r"ERROR code=73 kind=\w+ path=\S+/\.lock ", second.stderr.splitlines()[-1]), (
        second.stderr
      )
      refused += 1
    else:
      assert second.status == 0, (held.struck, second.stderr)
    case.assert_same(root, end)
    shutil.rmtree(root)
  with capsys.disabled():
    print(f"\n{name}: {pairs or PAIRS[name]} pairs, {refused} times the second was refused")


def _locked(case, operations):
  """Numbers of the operations while which the program has its lock; all of one that has none."""
  if not case.locked:
    return 0, len(operations)
  places = [k for k, (kind, path) in enumerate(operations) if re.search(case.locked, path)]
  assert places, "no operation is about a lock"
  # The lock is held before anything is written into it, and given back by what removes it.
  return places[0], places[-1] if len(places) > 1 else len(operations)


def _wait_for(hold, holder):
  """Returns when the first program is held."""
  tick = threading.Event()
  for _ in range(_WAIT_SECONDS * 100):
    if hold.exists():
      return
    assert not holder.done(), holder.result()
    tick.wait(0.01)
  raise AssertionError("the first program was never held")
