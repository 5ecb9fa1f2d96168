"""What is wrong, raw or hung is counted as that, told with the try that met it, and fails the test."""

import pytest
from attacks.attack import ATTACKS, HARMLESS, HUNG, RAW, REFUSED, WRONG
from attacks.tallies import Attacker, Tally


@pytest.fixture(scope="module")
def tally():
  attacker = Attacker()
  yield attacker.run("broken", 12)
  attacker.close()


def test_every_outcome_is_counted(tally):
  assert tally.outcomes == {HARMLESS: 3, REFUSED: 1, WRONG: 1, RAW: 5, HUNG: 2}
  assert tally.kinds == {"file_changed": 1}
  assert str(tally).startswith("broken: tried 12, refused 1, harmless 3, wrong 1, raw 5, hung 2")


def test_each_failure_names_the_try_and_what_it_did(tally):
  with pytest.raises(AssertionError) as failed:
    tally.assert_clean(())
  said = str(failed.value)
  for number, text in {
    2: "AnystepError",
    3: "another batch",
    4: "IndexError: pop from an empty deque",
    5: "KeyboardInterrupt",
    6: "Hung",
    7: "the process ended with -7",
    8: "the process did not answer",
    9: "MemoryError",
  }.items():
    assert f"try {number}, number {number}: " in said
    assert text in said
  assert "python -m attacks.attack 'broken' TRY TRY+1" in said


def test_an_attack_that_hardly_strikes_fails():
  tally = Tally("idle")
  for number in range(100):
    tally.count(number, [], outcome=HARMLESS if number else REFUSED)
  tally.assert_clean((HARMLESS,))
  with pytest.raises(AssertionError, match="too few refused"):
    tally.assert_clean((REFUSED,))


def test_an_attack_that_is_refused_where_nothing_may_be_fails():
  tally = Tally("forks")
  for number in range(1000):
    tally.count(number, [], outcome=HARMLESS if number else REFUSED)
  tally.assert_clean((HARMLESS,))
  with pytest.raises(AssertionError, match="refused"):
    tally.assert_clean((HARMLESS,), never=(REFUSED,))


@pytest.mark.parametrize("name", ["forks", "interrupts", "Grain's workers", "threads"])
def test_what_has_to_go_on_is_harmless(name):
  tally = Tally(name)
  tally.count(0, [], outcome=REFUSED)
  with pytest.raises(AssertionError, match="refused"):
    tally.assert_clean(ATTACKS[name].least, never=ATTACKS[name].never)
