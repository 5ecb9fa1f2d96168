"""Datasets of steps: ragged rows, and the end of the process."""

import atexit
import threading

import numpy as np
import pytest
import tensorflow as tf

from anystep.features.ragged import Ragged
from anystep.tasks.seqio_api import step_datasets


def test_steps_of_ragged_rows_are_ragged_tensors():
  lengths, rows = np.array([2, 0, 1]), np.array([1, 2])

  def read(step):
    return {"table": Ragged(Ragged(np.arange(3, dtype=np.int32) + step, lengths), rows), "number": rows}

  dataset = step_datasets.steps_dataset(read, read(0), steps=range(5, 7))
  assert dataset.element_spec["table"].shape.as_list() == [None, None, None]
  for step, found in enumerate(dataset, 5):
    assert found["table"].to_list() == [[[step, step + 1]], [[], [step + 2]]]
    assert found["number"].numpy().tolist() == [1, 2]


class TestProcessEnd:
  """A thread of TensorFlow's that asks for Python when there is none left would hold the process up."""

  def test_waits_for_who_reads_and_lets_nobody_in_after(self):
    gate = step_datasets._Gate()
    inside, leave, closed = threading.Event(), threading.Event(), threading.Event()

    def read():
      with gate:
        inside.set()
        leave.wait()

    def close():
      gate.close()
      closed.set()

    threads = [threading.Thread(target=read), threading.Thread(target=close)]
    threads[0].start()
    inside.wait()
    threads[1].start()
    assert not closed.wait(0.2)
    with pytest.raises(RuntimeError, match="the process ends"), gate:
      pass
    leave.set()
    for thread in threads:
      thread.join(timeout=5)
    assert closed.is_set()

  def test_is_told_to_the_gate_that_datasets_read_through(self, monkeypatch):
    told = []
    monkeypatch.setattr(atexit, "register", told.append)
    gate = step_datasets._gate.__wrapped__()
    assert told == [gate.close]
    monkeypatch.setattr(step_datasets, "_gate", lambda: gate)
    dataset = step_datasets.steps_dataset(
      lambda step: {"n": np.full(2, step)}, {"n": np.zeros(2, np.int64)}, steps=range(2**62)
    )
    held = iter(dataset.prefetch(4))
    assert [next(held)["n"].numpy().tolist() for _ in range(2)] == [[0, 0], [1, 1]]
    gate.close()
    with pytest.raises(tf.errors.OpError, match="the process ends"):
      list(held)
