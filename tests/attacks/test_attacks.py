"""No attack gets other data in silence, a crash, a traceback or an endless wait.

A sample of the tries runs always; `pytest -m soak -s` on this file runs all and prints what came of them.
"""

import pytest
from attacks.attack import ATTACKS
from attacks.tallies import Attacker


@pytest.fixture(scope="module")
def attacker():
  process = Attacker()
  yield process
  process.close()


def say(capsys, tally):
  with capsys.disabled():
    print(f"\n{tally}")


@pytest.mark.parametrize(
  "name", [pytest.param(name, marks=[pytest.mark.long] * attack.slow) for name, attack in ATTACKS.items()]
)
def test_a_sample_of_tries_finds_nothing_wrong_raw_or_hung(attacker, name, capsys):
  tally = attacker.run(name, ATTACKS[name].sample)
  say(capsys, tally)
  tally.assert_clean(ATTACKS[name].least, never=ATTACKS[name].never)


@pytest.mark.soak
@pytest.mark.parametrize("name", ATTACKS)
def test_all_tries_find_nothing_wrong_raw_or_hung(attacker, name, capsys):
  tally = attacker.run(name, ATTACKS[name].tries)
  say(capsys, tally)
  tally.assert_clean(ATTACKS[name].least, never=ATTACKS[name].never)
