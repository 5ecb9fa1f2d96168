"""After a kill, an interrupt or a full disk the same command finishes every program that leaves files.

The programs are the rows of `fault_cases.CASES`. A sample of the operations runs always; `pytest -m soak -s`
on this file disturbs all of them.
"""

import dataclasses
import errno
import re
import shutil
import signal
from collections.abc import Sequence

import pytest
from fault_cases import CASES, Case, files_of
from fault_runs import AFTER, MIDWAY, Fault, zygote

NEEDS_ROOM = ("create", "write", "truncate", "fsync", "replace", "mkdir")
DISKS = {"full": (errno.ENOSPC, True), "broken": (errno.EIO, False)}
# These take seconds for each run.
SLOW = ("a cache", "a training run")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Undisturbed:
  """A case, the program that runs it, what it leaves where nothing disturbs it, and its operations."""

  case: Case
  programs: object
  end: object
  operations: Sequence[tuple[str, str]]

  def places(self, kinds=(), *, wanted=None):
    """Numbers of operations of these kinds, or of all: so many as wanted, or as the soak takes."""
    places = [k for k, (kind, _) in enumerate(self.operations) if not kinds or kind in kinds]
    if wanted is None:
      return places[:: self.case.every]
    return sorted({places[(2 * k + 1) * len(places) // (2 * wanted)] for k in range(wanted)})

  def assert_finished(self, root):
    """The same command makes of the root what an undisturbed run leaves."""
    ended = self.programs.run(self.case.run(root))
    assert ended.status == 0, ended.stderr
    self.case.assert_same(root, self.end)


@pytest.fixture(
  scope="module",
  params=[pytest.param(name, marks=[pytest.mark.long] * (name in SLOW)) for name in CASES],
)
def undisturbed(request, tmp_path_factory):
  folder = tmp_path_factory.mktemp("undisturbed")
  case = CASES[request.param](folder)
  with zygote(*case.imports) as programs:
    end = folder / "end"
    case.begin(end)
    ended = programs.run(case.run(end))
    assert ended.status == 0, ended.stderr
    assert len(ended.operations) > 2
    yield Undisturbed(case=case, programs=programs, end=end, operations=ended.operations)


WANTED = pytest.mark.parametrize(
  "wanted", [pytest.param(2, id="sample"), pytest.param(None, id="all", marks=pytest.mark.soak)]
)


def disturb(undisturbed, folder, fault):
  """A run with a fault; how it ended and its root. The fault has struck."""
  root = folder / f"{fault.at}{fault.when}"
  undisturbed.case.begin(root)
  ended = undisturbed.programs.run(undisturbed.case.run(root, fault=fault))
  assert ended.struck, (fault, ended)
  return ended, root


def say(capsys, figures):
  with capsys.disabled():
    print(f"\n{figures}")


@WANTED
def test_a_program_that_is_killed_at_an_operation_is_finished_by_the_same_command(
  undisturbed, wanted, tmp_path, capsys
):
  faults = [Fault(at=place) for place in undisturbed.places(wanted=wanted)]
  faults += [Fault(at=place, when=MIDWAY) for place in undisturbed.places(("write",), wanted=wanted)]
  faults += [Fault(at=place, when=AFTER) for place in undisturbed.places(("replace",), wanted=wanted and 1)]
  committed = 0
  for fault in faults:
    ended, root = disturb(undisturbed, tmp_path, fault)
    assert ended.status == -signal.SIGKILL, (fault, ended)
    committed += bool(re.search(undisturbed.case.committed, ended.struck[1]))
    undisturbed.assert_finished(root)
    shutil.rmtree(root)
  if wanted is None:
    assert committed, "no kill was at the file that the result counts from"
  say(capsys, f"{len(faults)} killed, {committed} of them at {undisturbed.case.committed}, all finished")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
@WANTED
def test_a_program_that_is_interrupted_says_so_and_is_finished_by_the_same_command(
  undisturbed, number, wanted, tmp_path, capsys
):
  statuses = undisturbed.case.interrupted[number]
  places = undisturbed.places(wanted=wanted)[: None if wanted is None else 1]
  for place in places:
    ended, root = disturb(undisturbed, tmp_path, Fault(at=place, signal_number=number))
    assert ended.status in statuses, (ended.struck, ended)
    assert "Traceback" not in ended.stderr, ended.struck
    undisturbed.assert_finished(root)
    shutil.rmtree(root)
  say(capsys, f"{len(places)} interrupted by {number.name}, all finished")


@pytest.mark.parametrize("disk", DISKS)
@WANTED
def test_a_program_whose_disk_fails_says_so_and_is_finished_by_the_same_command(
  undisturbed, disk, wanted, tmp_path, capsys
):
  number, lasting = DISKS[disk]
  places = undisturbed.places(NEEDS_ROOM, wanted=wanted)
  for place in places:
    ended, root = disturb(undisturbed, tmp_path, Fault(at=place, errno=number, lasting=lasting))
    assert_says(ended, undisturbed.case.disk_failed)
    assert_same_or_whole(undisturbed, root, ended)
    undisturbed.assert_finished(root)
    shutil.rmtree(root)
  say(capsys, f"{len(places)} met a disk that is {disk}, all said so and were finished")


def assert_says(ended, kinds):
  """The program ended with one line for programs, the last one, and nothing of Python's own."""
  where = (ended.struck, ended.stderr)
  assert "Traceback" not in ended.stderr, where
  lines = ended.stderr.splitlines()
  assert [line for line in lines if line.startswith("ERROR")] == lines[-1:], where
  found = re.match(r"ERROR code=(\d+) kind=(\w+) ", lines[-1])
  assert found, where
  assert (ended.status, found[2]) in [(int(found[1]), kind) for kind in kinds], where


def assert_same_or_whole(undisturbed, root, ended):
  """What a program left that could not write names no file that is half of one, nor an attempt at one."""
  if undisturbed.case.leaves_attempts:
    return
  root.mkdir(exist_ok=True)
  start = root.with_name("start")
  undisturbed.case.begin(start)
  whole = set(files_of(start).items()) | set(files_of(undisturbed.end).items())
  found = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
  assert set(files_of(root).items()) <= whole, ended.struck
  assert found.keys() == files_of(root).keys(), ended.struck
  shutil.rmtree(start, ignore_errors=True)
