"""Evaluation sees every example of a split once, whatever the batch size."""

import dataclasses

import jax
import numpy as np
import seqio
import tiny_tasks

from anystep.caches.cache import open_cache
from anystep.train import main
from anystep.train.models.train_state import TrainState
from anystep.train.partitioning import Partitioner
from anystep.train.reports.evaluation import Evaluator


def test_the_metrics_do_not_depend_on_the_batch_size_and_are_those_of_the_scores(command):
  results, of_one_batch = (_evaluate(command, batch_size) for batch_size in (8, 32))
  assert of_one_batch["examples"] == results["examples"] == 21
  for name, value in results.items():
    np.testing.assert_allclose(of_one_batch[name], value, rtol=1e-5, err_msg=name)
  # An untrained model is as good as chance: about log(384) nats for each of the targets' tokens.
  assert 4 < results["cross_entropy"] < 9
  assert results["log_likelihood"] < -results["cross_entropy"]
  assert {"teacher_forced/edit_similarity", "teacher_forced/token_accuracy"} <= results.keys()


def test_a_metric_that_takes_targets_sees_what_the_cache_holds(command, tiny_cache):
  seen = []
  task = seqio.TaskRegistry.get(tiny_tasks.NAME)

  def record(targets, predictions):
    seen.append((list(targets), list(predictions)))
    return {"recorded": len(targets)}

  replaced = task.replace(metric_fns=[record])
  prepared = main.prepare(command(EVAL_DATASET="@eval/datasets.DatasetConfig()"))
  (evaluation,) = prepared.evaluation
  dataset = evaluation.dataset
  cached = dataclasses.replace(dataset.cached, tasks={task.name: replaced})
  dataset = dataclasses.replace(dataset, cached=cached)
  data = dataclasses.replace(evaluation, dataset=dataset)
  mesh = Partitioner().mesh(8)
  model = prepared.trainer.model
  (result,) = Evaluator(model, [data], mesh).evaluate(_initial_state(model))
  ((targets, predictions),) = seen
  assert (
    result.metrics["teacher_forced/recorded"]
    == len(predictions)
    == len(open_cache(tiny_cache, tiny_tasks.NAME, "validation"))
  )
  words = {"def", "return", "self", "x", "yield", "None", ""}
  assert all(isinstance(target, str) for target in targets)
  assert any(words & set(target.split(" ")) for target in targets)


def _evaluate(command, batch_size):
  prepared = main.prepare(command(EVAL_DATASET="@eval/datasets.DatasetConfig()", BATCH_SIZE=batch_size))
  model = prepared.trainer.model
  evaluator = Evaluator(model, prepared.evaluation, Partitioner().mesh(batch_size))
  (result,) = evaluator.evaluate(_initial_state(model))
  return result.metrics


def _initial_state(model):
  return TrainState(0, model.initial_variables(jax.random.key(0))["params"], None)
