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
from concurrent.futures import ThreadPoolExecutor

import pytest
from fault_cases import CASES, Case, files_of
from fault_runs import AFTER, MIDWAY, Fault, zygote

NEEDS_ROOM = ("create", "write", "truncate", "fsync", "replace", "mkdir")
DISKS = {"full": (errno.ENOSPC, True), "broken": (errno.EIO, False)}
# These take seconds for each run.
SLOW = ("a cache", "a training run")
AT_A_TIME = 2


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

  def disturb(self, folder, faults, check):
    """Runs the program once for each fault, which strikes, and then again; returns how the first runs ended.

    `check` is called with how each ended, its root and its fault, before the same command finishes it.
    """

    def run(fault):
      root = folder / f"{fault.at}{fault.when}"
      self.case.begin(root)
      ended = self.programs.run(self.case.run(root, fault=fault))
      assert ended.struck, (fault, ended)
      check(ended, root, fault)
      again = self.programs.run(self.case.run(root))
      assert again.status == 0, (ended.struck, again.stderr)
      return ended, root

    found = []
    with ThreadPoolExecutor(AT_A_TIME) as pool:
      for ended, root in pool.map(run, faults):
        self.case.assert_same(root, self.end)
        shutil.rmtree(root)
        found.append(ended)
    return found


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
  "wanted", [pytest.param(1, id="sample"), pytest.param(None, id="all", marks=pytest.mark.soak)]
)


def say(capsys, figures):
  with capsys.disabled():
    print(f"\n{figures}")


@WANTED
def test_a_program_that_is_killed_at_an_operation_is_finished_by_the_same_command(
  undisturbed, wanted, tmp_path, capsys
):
  def check(ended, root, fault):
    assert ended.status == -signal.SIGKILL, ended

  faults = [Fault(at=place) for place in undisturbed.places(wanted=wanted)]
  faults += [Fault(at=place, when=MIDWAY) for place in undisturbed.places(("write",), wanted=wanted)]
  faults += [Fault(at=place, when=AFTER) for place in undisturbed.places(("replace",), wanted=wanted)]
  ends = undisturbed.disturb(tmp_path, faults, check)
  committed = sum(bool(re.search(undisturbed.case.committed, ended.struck[1])) for ended in ends)
  assert committed or wanted, "no kill was at the file that the result counts from"
  say(capsys, f"{len(ends)} killed, {committed} of them at {undisturbed.case.committed}, all finished")


@pytest.mark.parametrize(
  "number",
  [
    pytest.param(signal.SIGINT, id="SIGINT", marks=pytest.mark.soak),
    pytest.param(signal.SIGTERM, id="SIGTERM"),
  ],
)
@WANTED
def test_a_program_that_is_interrupted_says_so_and_is_finished_by_the_same_command(
  undisturbed, number, wanted, tmp_path, capsys
):
  def check(ended, root, fault):
    before = ended.operations[: fault.at]
    assert ended.status in undisturbed.case.may_end_with(number, before=before), ended
    assert "Traceback" not in ended.stderr, ended.struck

  faults = [Fault(at=place, signal_number=number) for place in undisturbed.places(wanted=wanted)]
  ends = undisturbed.disturb(tmp_path, faults, check)
  say(capsys, f"{len(ends)} interrupted by {number.name}, all finished")


@pytest.mark.parametrize("disk", DISKS)
@WANTED
def test_a_program_whose_disk_fails_says_so_and_is_finished_by_the_same_command(
  undisturbed, disk, wanted, tmp_path, capsys
):
  def check(ended, root, fault):
    operation, path = ended.struck
    pattern = undisturbed.case.passed_over
    passed_over = pattern is not None and operation == "unlink" and re.search(pattern, path)
    if not passed_over or ended.status:
      assert_says(ended, undisturbed.case.disk_failed)
    assert_same_or_whole(undisturbed, root, ended)

  number, lasting = DISKS[disk]
  places = undisturbed.places(NEEDS_ROOM, wanted=wanted)
  faults = [Fault(at=place, errno=number, lasting=lasting) for place in places]
  ends = undisturbed.disturb(tmp_path, faults, check)
  say(capsys, f"{len(ends)} met a disk that is {disk}, all said so and were finished")


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
  start = root.with_name(f"{root.name}.start")
  undisturbed.case.begin(start)
  whole = set(files_of(start).items()) | set(files_of(undisturbed.end).items())
  found = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
  assert set(files_of(root).items()) <= whole, ended.struck
  assert found.keys() == files_of(root).keys(), ended.struck
  shutil.rmtree(start, ignore_errors=True)


def test_a_program_that_is_interrupted_may_end_well_only_after_its_last_commit():
  interrupted = {signal.SIGINT: {130}, signal.SIGTERM: {75}}
  case = Case(
    program="p",
    imports=(),
    arguments=lambda root: (),
    committed="c",
    interrupted=interrupted,
    last_commit="c_5/ok",
  )
  begun = [("replace", "c_4/ok.1"), ("create", "c_5/ok.2"), ("write", "c_5/ok.2")]
  done = [*begun, ("replace", "c_5/ok.2")]
  assert case.may_end_with(signal.SIGTERM, before=begun) == {75}
  assert case.may_end_with(signal.SIGTERM, before=done) == {75, 0}
  assert case.may_end_with(signal.SIGINT, before=done) == {130}
  case = dataclasses.replace(case, last_commit=None)
  assert case.may_end_with(signal.SIGTERM, before=done) == {75}
