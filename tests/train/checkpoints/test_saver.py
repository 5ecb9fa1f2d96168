"""Checkpoints are written while the steps go on, and are what a save that the steps wait for writes."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from small_states import RUN, VALUES, abstract, assert_restored, data_of, state_of

from anystep.errors import AnystepError, ExitCode
from anystep.train.checkpoints import checkpoints, saver
from anystep.train.models.train_state import TrainState


class Disk:
  """Holds back what is written until a test lets it go on, or fails it."""

  def __init__(self, monkeypatch):
    self.goes_on, self.began, self.error = threading.Event(), threading.Event(), None
    monkeypatch.setattr(checkpoints, "save_arrays", self._write)

  def _write(self, path, state, write=checkpoints.save_arrays):
    self.began.set()
    assert self.goes_on.wait(60)
    if self.error is not None:
      raise self.error
    write(path, state)


@pytest.fixture
def disk(monkeypatch):
  disk = Disk(monkeypatch)
  yield disk
  disk.goes_on.set()


def make_saver(model_dir, **config):
  config = checkpoints.CheckpointConfig(period_steps=3, **config)
  return saver.CheckpointSaver(model_dir, config, run=RUN, trained_with=VALUES)


@jax.jit
def next_state(state):
  return jax.tree.map(lambda leaf: leaf + 1, state)


def test_steps_that_overwrite_the_state_go_on_while_it_is_written(tmp_path, disk):
  step = jax.jit(next_state, donate_argnums=0)
  state = step(state_of(2))
  with make_saver(tmp_path) as saves:
    saves.save(state, data_of(3))
    assert disk.began.wait(60)
    for _ in range(5):
      state = step(state)
    saves.raise_failure()
    assert int(state.step) == 8
    assert checkpoints.checkpoint_steps(tmp_path) == []
    disk.goes_on.set()
    saves.wait()
  assert_restored(tmp_path, 3)


def test_a_copy_is_split_over_devices_as_the_state_is():
  mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
  sharding = NamedSharding(mesh, PartitionSpec("model", "data"))
  leaf = jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8), sharding)
  whole = jax.device_put(jnp.int32(3), NamedSharding(mesh, PartitionSpec()))
  state = TrainState(whole, {"w": leaf}, ())
  copied = saver.copy_to_hosts(state)
  jax.jit(next_state, donate_argnums=0)(state)
  assert leaf.is_deleted()
  assert copied.params["w"].sharding.spec == sharding.spec
  assert copied.params["w"].sharding.memory_kind == "pinned_host"
  np.testing.assert_array_equal(copied.params["w"], np.arange(64.0).reshape(8, 8))
  assert int(copied.step) == 3


def test_a_save_waits_for_the_one_before(tmp_path, disk):
  with make_saver(tmp_path) as saves:
    saves.save(state_of(3), data_of(3))
    second = threading.Thread(target=saves.save, args=(state_of(6), data_of(6)))
    second.start()
    second.join(0.3)
    assert second.is_alive()
    disk.goes_on.set()
    second.join(60)
    assert not second.is_alive()
  assert checkpoints.checkpoint_steps(tmp_path) == [3, 6]
  assert_restored(tmp_path, 6)


@pytest.mark.parametrize("ends_by", ["the next step", "the next save", "the end"])
def test_a_save_that_fails_ends_the_run_and_leaves_the_checkpoints_before(tmp_path, disk, ends_by):
  disk.goes_on.set()

  def run():
    with make_saver(tmp_path) as saves:
      saves.save(state_of(3), data_of(3))
      saves.wait()
      disk.error = AnystepError(ExitCode.IO, "checkpoint_write", got="no space", fix="make room")
      saves.save(state_of(6), data_of(6))
      if ends_by == "the next step":
        saves._save.exception()
        saves.raise_failure()
        pytest.fail("the failure was passed over")
      if ends_by == "the next save":
        saves.save(state_of(9), data_of(9))
        pytest.fail("the failure was passed over")

  with pytest.raises(AnystepError) as failed:
    run()
  assert failed.value.kind == "checkpoint_write"
  assert checkpoints.checkpoint_steps(tmp_path) == [3]
  assert_restored(tmp_path, 3)


def test_an_error_of_the_run_waits_for_the_save_and_is_the_one_that_is_raised(tmp_path, disk):
  def run(step):
    with make_saver(tmp_path) as saves:
      saves.save(state_of(step), data_of(step))
      raise KeyError

  threading.Timer(0.2, disk.goes_on.set).start()
  with pytest.raises(KeyError):
    run(3)
  assert_restored(tmp_path, 3)
  disk.error = OSError("the disk is gone")
  with pytest.raises(KeyError):
    run(6)
  assert checkpoints.checkpoint_steps(tmp_path) == [3]


def test_old_checkpoints_are_removed_but_for_periodic_and_pinned_ones(tmp_path):
  with make_saver(tmp_path, keep=2, keep_period_steps=4) as saves:
    for step in range(1, 11):
      saves.save(state_of(step), data_of(step))
      saves.wait()
      if step == 3:
        (tmp_path / "checkpoint_3" / checkpoints.PINNED).touch()
  assert checkpoints.checkpoint_steps(tmp_path) == [3, 4, 8, 9, 10]
  jax.tree.map(np.testing.assert_array_equal, checkpoints.restore_state(tmp_path, 3, abstract()), state_of(3))
  assert checkpoints.find_checkpoint(tmp_path, before_step=4).step == 3


def test_saves_are_at_multiples_of_the_period_and_at_listed_steps():
  config = checkpoints.CheckpointConfig(period_steps=4, steps=(0, 5))
  assert [step for step in range(10) if config.saves_at(step)] == [0, 4, 5, 8]


@pytest.mark.parametrize(
  "values",
  [
    {"period_steps": 0},
    {"period_steps": None},
    {"period_steps": 2.0},
    {"period_steps": 2, "keep": 0},
    {"period_steps": 2, "keep_period_steps": -1},
    {"period_steps": 2, "steps": 5},
    {"period_steps": 2, "steps": ["5"]},
  ],
)
def test_periods_that_are_no_whole_numbers_are_refused(values):
  with pytest.raises(ValueError, match="CheckpointConfig"):
    checkpoints.CheckpointConfig(**values)
