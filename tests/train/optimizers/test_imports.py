"""Models, losses and optimizers are mathematics: they need neither data pipelines nor logs of metrics."""

import subprocess
import sys
import textwrap

from train_runs import ENVIRONMENT
from unimportable import WITHOUT

HEAVY = ("tensorflow", "seqio", "clu", "tensorflow_datasets", "apache_beam")
PROGRAM = """
  from anystep.train.models import accumulation, decoder_only, encoder_decoder, losses, train_state
  from anystep.train.optimizers import adafactor, by_parameter, chain, learning_rate_schedule, with_average

  assert not {name.partition(".")[0] for name in sys.modules} & set(%(heavy)r)
  by_parameter([("", with_average(chain([adafactor(learning_rate_schedule())]), decay=0.9))])
"""


def test_models_losses_and_optimizers_import_without_tensorflow_seqio_and_clu():
  program = "import sys\n" + textwrap.dedent(WITHOUT) + textwrap.dedent(PROGRAM)
  code = program % {"heavy": HEAVY}
  ended = subprocess.run(
    [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False
  )
  assert ended.returncode == 0, ended.stderr
