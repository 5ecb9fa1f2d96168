"""Packed rows train as their examples would alone, and resume as others do."""

import jax
import numpy as np
import pytest
import seqio
import tiny_tasks

from anystep.caches.cache import open_cache
from anystep.features.converters import EncoderDecoderConverter
from anystep.features.digest import batch_digest
from anystep.features.ragged import Ragged
from anystep.files.names import DATA_PLAN
from anystep.plans.plan import Plan
from anystep.streams.stream import open_stream
from anystep.tasks.reading.task_reader import TaskReader
from anystep.train import main
from anystep.train.models.encoder_decoder import EncoderDecoderModel
from anystep.train.network.t5 import T5Config, Transformer
from anystep.train.reports.step_log import read_step_log

LENGTHS = {"inputs": 12, "targets": 9}
# Examples of each row; together they fit.
COUNTS = np.array([3, 1, 2])


@pytest.fixture(scope="module")
def model():
  config = T5Config(
    vocab_size=32, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32, num_encoder_layers=2, num_decoder_layers=2
  )
  return EncoderDecoderModel(Transformer(config))


@pytest.fixture(scope="module")
def params(model):
  return model.initial_variables(jax.random.key(0))["params"]


@pytest.fixture(scope="module")
def examples():
  rng = np.random.default_rng(0)

  def feature(lengths):
    return Ragged(rng.integers(2, 32, sum(lengths)).astype(np.int32), np.array(lengths))

  return {"inputs": feature([4, 5, 3, 12, 1, 7]), "targets": feature([2, 3, 4, 9, 4, 5])}


def summed_loss(model, params, batch):
  loss, _ = jax.jit(model.loss_fn)(params, batch)
  return float(loss)


def test_the_loss_of_packed_rows_is_that_of_their_examples(model, params, examples):
  converter = EncoderDecoderConverter()
  packed, alone = converter(examples, LENGTHS, COUNTS), converter(examples, LENGTHS)
  assert len(packed["encoder_input_tokens"]) == 3
  assert len(alone["encoder_input_tokens"]) == 6
  assert summed_loss(model, params, packed) == pytest.approx(summed_loss(model, params, alone), rel=1e-5)


@pytest.mark.parametrize("counts", [None, COUNTS])
def test_what_stands_in_padding_changes_no_loss(model, params, examples, counts):
  batch = EncoderDecoderConverter()(examples, LENGTHS, counts)
  rows = {name: np.concatenate([values, np.zeros_like(values[:2])]) for name, values in batch.items()}
  expected = summed_loss(model, params, rows)
  assert expected == pytest.approx(summed_loss(model, params, batch), rel=1e-6)
  rng = np.random.default_rng(1)
  changed = {name: values.copy() for name, values in rows.items()}
  # Rows that are all padding, and targets and the decoder's inputs wherever no target has weight.
  for name in ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens"):
    changed[name][len(batch[name]) :] = rng.integers(2, 32, changed[name][len(batch[name]) :].shape)
  unweighted = rows["decoder_loss_weights"] == 0
  changed["decoder_input_tokens"][unweighted] = rng.integers(2, 32, unweighted.sum())
  assert any((changed[name] != rows[name]).any() for name in rows)
  assert summed_loss(model, params, changed) == pytest.approx(expected, rel=1e-6)


@pytest.mark.long
def test_a_packed_run_that_stopped_goes_on_with_the_plans_batches(command, tiny_cache, tmp_path):
  lengths = {"inputs": 96, "targets": 48}
  bindings = {"PACKING": "'best_fit'", "TASK_FEATURE_LENGTHS": repr(lengths)}
  main.main(command(TRAIN_STEPS=3, **bindings))
  main.main(command(**bindings))
  plan = Plan.read(tmp_path / "model" / DATA_PLAN, fix="train first")
  assert plan.packing == "best_fit"
  assert plan.tasks[tiny_tasks.NAME].num_units < 300
  cache = open_cache(tiny_cache, tiny_tasks.NAME, "train")
  reader = TaskReader(seqio.TaskRegistry.get(tiny_tasks.NAME), cache, lengths)
  stream = open_stream(
    plan, tiny_cache, transforms={tiny_tasks.NAME: reader}, feature_converter=EncoderDecoderConverter()
  )
  logged = [record for start in read_step_log(tmp_path / "model") for record in start]
  with stream:
    assert [record.digest for record in logged] == [batch_digest(next(stream)) for _ in range(7)]
