"""Models, networks, losses and optimizers need neither TensorFlow nor SeqIO nor clu."""

import subprocess
import sys

from train_runs import ENVIRONMENT

CODE = """
import sys
for name in ("tensorflow", "tensorflow_datasets", "seqio", "clu", "apache_beam", "grain"):
  sys.modules[name] = None  # importing it fails
import importlib, pkgutil
import anystep.train.models, anystep.train.network
import anystep.train.optimizers
for package in (anystep.train.models, anystep.train.network, anystep.train.optimizers):
  for module in pkgutil.iter_modules(getattr(package, "__path__", [])):
    importlib.import_module(f"{package.__name__}.{module.name}")
import anystep.train.partitioning
from anystep.train.optimizers import adafactor, by_parameter, chain, learning_rate_schedule, with_average
by_parameter([("", with_average(chain([adafactor(learning_rate_schedule())]), decay=0.9))])
"""


def test_models_losses_and_optimizers_import_without_tensorflow_seqio_and_clu():
  subprocess.run([sys.executable, "-c", CODE], check=True, env=ENVIRONMENT)
