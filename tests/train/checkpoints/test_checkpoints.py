"""A checkpoint counts wholly or not at all, and is never taken for what it is not."""

import errno
import gc
import json
import math
import os
import resource
import shutil
import sys

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from fault_runs import Seam
from small_states import RUN, abstract, assert_restored, data_of, save, state_of
from train_runs import as_version_1, sign

from anystep.errors import AnystepError
from anystep.files import input_files
from anystep.train import main
from anystep.train.checkpoints import checkpoints, integrity, saved_arrays
from anystep.train.demo.run_comparison import compare_runs
from anystep.train.leaves.orbax_trees import read_tree
from anystep.train.models.train_state import TrainState


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """A directory with checkpoints of steps 3 and 6; not to be changed."""
  directory = tmp_path_factory.mktemp("saved")
  save(directory, 3)
  save(directory, 6)
  return directory


@pytest.fixture
def model_dir(saved, tmp_path):
  """A copy of it."""
  return shutil.copytree(saved, tmp_path / "model")


def test_what_was_saved_is_restored(model_dir):
  assert checkpoints.checkpoint_steps(model_dir) == [3, 6]
  assert_restored(model_dir, 6)
  document = json.loads((model_dir / "checkpoint_6" / "integrity.json").read_text())
  assert (document["version"], document["step"], document["run"]) == (2, 6, RUN)
  files = {
    path.relative_to(model_dir / "checkpoint_6").as_posix()
    for path in (model_dir / "checkpoint_6").rglob("*")
    if path.is_file()
  }
  assert files - document["files"].keys() == {"integrity.json", "commit_success.txt"}


def test_a_large_leaf_is_stored_in_parts(tmp_path, monkeypatch):
  monkeypatch.setattr(saved_arrays, "_IN_CHUNKS", ocp.SaveArgs(chunk_byte_size=256))
  state = TrainState(jnp.int32(3), {"kernel": jnp.ones((32, 16))}, optax.EmptyState())
  saved_arrays.save_arrays(tmp_path / "state", state)
  leaf = read_tree(str(tmp_path / "state"))["params", "kernel"]
  assert math.prod(leaf.chunk) * 4 <= 256 < leaf.num_bytes
  np.testing.assert_array_equal(leaf.read_whole(), np.ones((32, 16)))


KEEPS_ONE = checkpoints.CheckpointConfig(period_steps=3, keep=1)


def begin_with_nothing(root):
  root.mkdir()


def begin_with_one(root):
  root.mkdir()
  save(root, 3)


def begin_with_an_unfinished_one(root):
  begin_with_one(root)
  (save(root, 6) / checkpoints.COMMITTED).unlink()
  (root / "checkpoint_6" / checkpoints.UNFINISHED).touch()


def begin_with_two(root):
  begin_with_one(root)
  save(root, 6)


class OwnSeam(Seam):
  """Sees what the trainer does itself; Orbax writes in threads, into a folder that it then renames."""

  def perform(self, kind, path, do, half=None):
    if ".orbax-checkpoint-tmp" in path and kind != "replace":
      return do()
    return super().perform(kind, path, do, half)


@pytest.mark.parametrize(
  ("begin", "do", "before", "after"),
  [
    (begin_with_nothing, lambda root: save(root, 6), None, 6),
    (begin_with_one, lambda root: save(root, 6), 3, 6),
    (begin_with_an_unfinished_one, lambda root: save(root, 6), 3, 6),
    (begin_with_two, lambda root: checkpoints.remove_old_checkpoints(root, KEEPS_ONE), 6, 6),
  ],
  ids=["first", "second", "over an unfinished one", "removing the first"],
)
def test_a_kill_at_any_file_operation_leaves_the_old_newest_checkpoint_or_the_new_one(
  begin, do, before, after, tmp_path
):
  root, copies = tmp_path / "model", tmp_path / "copies"
  copies.mkdir()
  begin(root)
  seam = OwnSeam(str(root), copies=copies)
  with seam.installed():
    do(root)
  found = []
  for number in range(len(seam.operations)):
    copy = copies / str(number)
    checkpoint = checkpoints.find_checkpoint(copy)
    found.append(checkpoint and checkpoint.step)
    if checkpoint is not None:
      assert_restored(copy, checkpoint.step)
    # Nor does what a kill left stand in the way.
    if number % 4 == 0 and (checkpoint is None or checkpoint.step == 3):
      save(copy, 6)
      assert checkpoints.find_checkpoint(copy).step == 6
  assert len(found) > 5
  committed = found.index(after)
  assert found == [before] * committed + [after] * (len(found) - committed)
  assert_restored(root, after)


def test_a_checkpoint_is_durable_before_its_marker_is_there(model_dir):
  seam = OwnSeam(str(model_dir))
  with seam.installed():
    save(model_dir, 9)
  marker = "checkpoint_9/commit_success.txt"
  committed = next(k for k, (_, path) in enumerate(seam.operations) if path.startswith(marker))
  synced = {path for kind, path in seam.operations[:committed] if kind == "fsync"}
  files = {f"checkpoint_9/{name}" for name in integrity.file_names(model_dir / "checkpoint_9")}
  assert files - synced == {marker}
  assert {"checkpoint_9", "checkpoint_9/state", ""} <= synced


def flip(path):
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)


def largest(state):
  """The file with most of the arrays."""
  return max(state.rglob("d/*"), key=lambda path: path.stat().st_size)


def cut(path):
  path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {
  "a bit of an array": (lambda folder: flip(largest(folder / "state")), "checkpoint_file"),
  "a byte cut off": (lambda folder: cut(largest(folder / "state")), "checkpoint_file"),
  "a file lost": (lambda folder: largest(folder / "state").unlink(), "checkpoint_file"),
  "a folder lost": (lambda folder: shutil.rmtree(folder / "state"), "checkpoint_file"),
  "what it was trained with": (lambda folder: flip(folder / "trained_with.json"), "checkpoint_file"),
  "the data's state": (lambda folder: (folder / "data_uncached.json").write_text("{}"), "checkpoint_file"),
  "the marker": (lambda folder: flip(folder / "commit_success.txt"), "checkpoint_integrity"),
  "the hashes": (lambda folder: flip(folder / "integrity.json"), "checkpoint_integrity"),
  "no hashes": (lambda folder: (folder / "integrity.json").unlink(), "checkpoint_integrity"),
  "deep hashes": (
    lambda folder: resigned(folder, "[" * 100_000),
    "checkpoint_integrity",
  ),
  "another version's hashes": (lambda folder: resigned(folder, '{"version": 3}'), "checkpoint_integrity"),
  "hashes without a run": (
    lambda folder: resigned(folder, '{"version": 2, "step": 6, "run": null, "files": {}}'),
    "checkpoint_integrity",
  ),
  "hashes of nothing": (
    lambda folder: resigned(folder, '{"version": 2, "step": 6, "run": "r", "files": {}}'),
    "checkpoint_integrity",
  ),
}


# The sizes and hashes fit, and what they vouch for says something else.
DOCUMENTS = {
  "values in a list": '{"version": 1, "values": []}',
  "no values": '{"version": 1, "values": null}',
  "text for values": '{"version": 1, "values": "rate"}',
  "nothing of values": '{"version": 1}',
  "another version": '{"version": 2, "values": {"rate": 0.1}}',
  "no version": '{"values": {"rate": 0.1}}',
  "a list": "[]",
  "nothing": "null",
  "no UTF-8": b'{"version": 1, "values": {"\xff": 1}}',
}
for told, text in DOCUMENTS.items():
  DAMAGES[f"trained_with.json: {told}"] = (
    lambda folder, text=text: forge(folder, "trained_with.json", text),
    "checkpoint_integrity",
  )


def forge(folder, name, text):
  (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
  sign(folder)


def resigned(folder, text):
  (folder / "integrity.json").write_text(text)
  (folder / "commit_success.txt").write_text(integrity._sha256(text))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_means_the_one_before(damage, model_dir, capsys):
  change, kind = DAMAGES[damage]
  change(model_dir / "checkpoint_6")
  assert_restored(model_dir, 3)
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith(f"checkpoint_6 cannot be read: ERROR code=65 kind={kind} ")


def test_a_data_state_that_nobody_vouches_for_is_not_read(model_dir):
  (model_dir / "checkpoint_6" / "data_plan.json").write_text("a plan")
  assert_restored(model_dir, 6)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES])
@pytest.mark.parametrize("name", ["commit_success.txt", "manifest.ocdbt", "trained_with.json"])
def test_a_file_that_the_system_does_not_open_now_is_no_damage(number, name, model_dir, monkeypatch, capsys):
  def fail(path, original=input_files._open_local):
    if path.name == name:
      raise OSError(number, os.strerror(number))
    return original(path)

  monkeypatch.setattr(input_files, "_open_local", fail)
  with pytest.raises(AnystepError) as refused:
    checkpoints.find_checkpoint(model_dir)
  kinds = {
    errno.EMFILE: (74, "too_many_files"),
    errno.EIO: (74, "io_failed"),
    errno.EACCES: (66, "file_unreadable"),
  }
  assert (refused.value.code, refused.value.kind) == kinds[number]
  assert os.path.basename(refused.value.fields["path"]) == name
  assert capsys.readouterr().err == ""


def test_hashes_tell_files_apart_that_end_in_their_own_crc(tmp_path):
  """As TensorStore's OCDBT files do: the CRC of such a file is the same whatever is in it."""
  for name, content in (("one", b"some arrays"), ("two", b"some others")):
    crc = google_crc32c.value(content)
    (tmp_path / name).write_bytes(content + crc.to_bytes(4, "little"))
  for algorithm, same in (("crc32c", True), ("blake2b", False)):
    one, two = (integrity.fingerprint(tmp_path / name, algorithm=algorithm) for name in ("one", "two"))
    assert (one == two) is same


def test_files_are_hashed_piece_by_piece(tmp_path, monkeypatch):
  content = bytes(range(256)) * 5
  (tmp_path / "file").write_bytes(content)
  whole = {name: integrity.fingerprint(tmp_path / "file", algorithm=name) for name in ("crc32c", "blake2b")}
  monkeypatch.setattr(integrity, "_PIECE_BYTES", 100)
  assert whole["crc32c"] == {"bytes": 1280, "crc32c": f"{google_crc32c.value(content):08x}"}
  for name, noted in whole.items():
    assert integrity.fingerprint(tmp_path / "file", algorithm=name) == noted


def version_1(directory):
  for path in directory.glob("checkpoint_*"):
    as_version_1(path)


def test_a_checkpoint_of_version_1_is_read_and_checked(model_dir, capsys):
  version_1(model_dir)
  found = checkpoints.find_checkpoint(model_dir)
  assert found == checkpoints.Checkpoint(step=6, first_step=0, data=data_of(6), run=None, trained_with=None)
  flip(model_dir / "checkpoint_6" / "state" / "_METADATA")
  assert checkpoints.find_checkpoint(model_dir).step == 3
  assert "kind=checkpoint_file" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "used"), [("checkpoint_5", 3), ("checkpoint_9", 3), ("checkpoint_2", 3)])
def test_a_renamed_checkpoint_is_not_that_of_its_name(name, used, model_dir, capsys):
  (model_dir / "checkpoint_6").rename(model_dir / name)
  assert_restored(model_dir, used)
  said = capsys.readouterr().err
  if name != "checkpoint_2":
    assert f"{name} cannot be read: ERROR code=65 kind=checkpoint_step" in said
    assert 'got="the state of step 6"' in said
    assert "rename it back to checkpoint_6" in said


def test_a_copied_checkpoint_does_not_hide_the_one_that_it_is_of(model_dir):
  shutil.copytree(model_dir / "checkpoint_3", model_dir / "checkpoint_8")
  assert_restored(model_dir, 6)


def test_names_that_only_look_like_a_checkpoints_are_none(model_dir):
  for name in ("checkpoint_09", "checkpoint_٧", "checkpoint_", "checkpoint_9.bak", "checkpoint_+9"):
    shutil.copytree(model_dir / "checkpoint_6", model_dir / name)
  assert checkpoints.checkpoint_steps(model_dir) == [3, 6]


def test_the_state_itself_tells_that_a_checkpoint_of_version_1_was_renamed(model_dir):
  version_1(model_dir)
  (model_dir / "checkpoint_6").rename(model_dir / "checkpoint_5")
  assert checkpoints.find_checkpoint(model_dir).step == 5
  with pytest.raises(AnystepError) as refused:
    checkpoints.restore_state(model_dir, 5, abstract())
  assert (refused.value.code, refused.value.kind) == (65, "checkpoint_step")


def test_arrays_that_cannot_be_restored_are_damage_and_another_model_is_not(model_dir):
  other = abstract()
  other.params["b"] = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=other.params["b"].sharding)
  with pytest.raises(AnystepError) as refused:
    checkpoints.restore_state(model_dir, 6, other)
  assert (refused.value.code, refused.value.kind) == (76, "checkpoint_tree")
  assert refused.value.fields["leaf"] == "params/b"


@pytest.mark.parametrize(
  "name", ["_METADATA", "manifest.ocdbt", "_CHECKPOINT_METADATA", "the arrays", "_sharding", "d"]
)
@pytest.mark.parametrize("change", ["nothing in it", "something else in it", "half of it", "gone"])
def test_whatever_of_the_state_cannot_be_restored_is_damage_or_harmless(name, change, model_dir, capfd):
  state = model_dir / "checkpoint_6" / "state"
  path = largest(state) if name == "the arrays" else state / name
  content = b"" if path.is_dir() else path.read_bytes()
  shutil.rmtree(path) if path.is_dir() else path.unlink()
  if change != "gone":
    path.write_bytes(
      {
        "nothing in it": b"",
        "something else in it": b"something else",
        "half of it": content[: len(content) // 2],
      }[change]
    )
  capfd.readouterr()
  # One file is for people; the other's lack means as many devices as the model asks for.
  if name == "_CHECKPOINT_METADATA" or (name, change) == ("_sharding", "gone"):
    restored = checkpoints.restore_state(model_dir, 6, abstract())
    jax.tree.map(np.testing.assert_array_equal, restored, state_of(6))
  else:
    with pytest.raises(AnystepError) as refused:
      checkpoints.restore_state(model_dir, 6, abstract())
    assert (refused.value.code, refused.value.kind) == (65, "checkpoint_corrupt")
    assert refused.value.fields["got"]
  assert capfd.readouterr().err == ""


class FailsAtItsEnd:
  """As an answer that nobody can take any more: Python prints a traceback for it."""

  def __init__(self, message):
    self.message = message

  def __del__(self):
    raise RuntimeError(self.message)


def test_answers_that_come_late_to_a_restore_that_failed_print_no_traceback(model_dir, monkeypatch):
  printed = []
  monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: printed.append(str(unraisable.exc_value)))

  def fail(*args, **kwargs):
    FailsAtItsEnd("Event loop is closed")
    raise ValueError("DATA_LOSS")

  monkeypatch.setattr(ocp.StandardCheckpointer, "restore", fail)
  with pytest.raises(AnystepError, match="DATA_LOSS"):
    checkpoints.restore_state(model_dir, 6, abstract())
  FailsAtItsEnd("Event loop is closed")
  assert printed == []
  FailsAtItsEnd("something else")
  assert printed == ["something else"]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_process_that_may_open_no_more_files_says_so_and_damages_no_checkpoint(model_dir, capfd):
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  open_files = len(os.listdir("/proc/self/fd")) - 1
  kinds = set()
  # From none to so many that it is done.
  for more in range(100):
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files + more, hard))
    try:
      checkpoints.restore_state(model_dir, 6, abstract())
      break
    except AnystepError as error:
      kinds.add((error.code, error.kind))
    finally:
      resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    gc.collect()
  assert kinds == {(74, "too_many_files")}
  assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
  ("error", "code", "kind"),
  [
    (OSError(errno.EIO, "Input/output error"), 74, "io_failed"),
    (ValueError("UNAVAILABLE: Error reading file [OS error 5: EIO Input/output error]"), 74, "io_failed"),
    (ValueError("RESOURCE_EXHAUSTED: [OS error 24: EMFILE Too many open files]"), 74, "too_many_files"),
    (OSError(errno.ENOENT, "No such file or directory"), 65, "checkpoint_corrupt"),
    (ValueError("NOT_FOUND: [OS error 2: ENOENT No such file or directory]"), 65, "checkpoint_corrupt"),
    (NotADirectoryError(errno.ENOTDIR, "Not a directory"), 65, "checkpoint_corrupt"),
    (ValueError("DATA_LOSS: CRC-32C checksum verification failed"), 65, "checkpoint_corrupt"),
  ],
)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_what_the_system_refuses_is_no_damage(is_wrapped, error, code, kind, model_dir, monkeypatch):
  def fail(*args, **kwargs):
    if is_wrapped:
      raise ValueError("Error opening zarr driver") from error
    raise error

  monkeypatch.setattr(ocp.StandardCheckpointer, "restore", fail)
  with pytest.raises(AnystepError) as refused:
    checkpoints.restore_state(model_dir, 6, abstract())
  assert (refused.value.code, refused.value.kind) == (code, kind)
  assert refused.value.fields["path"]


def test_a_run_whose_disk_fails_while_it_restores_keeps_its_checkpoints(trained, command, monkeypatch):
  def fail(*args, **kwargs):
    raise OSError(errno.EIO, "Input/output error")

  before = sorted(path.name for path in trained.iterdir())
  monkeypatch.setattr(ocp.StandardCheckpointer, "restore", fail)
  with pytest.raises(AnystepError) as refused:
    main.main(command())
  assert (refused.value.code, refused.value.kind) == (74, "io_failed")
  assert sorted(path.name for path in trained.iterdir()) == before


def test_a_device_that_fails_is_no_damage(model_dir, monkeypatch):
  def fail(*args, **kwargs):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room")

  monkeypatch.setattr(ocp.StandardCheckpointer, "restore", fail)
  with pytest.raises(jax.errors.JaxRuntimeError):
    checkpoints.restore_state(model_dir, 6, abstract())


def test_a_checkpoint_that_cannot_be_written_says_so_and_leaves_the_one_before(model_dir, monkeypatch):
  def fail(*args, **kwargs):
    raise ValueError("RESOURCE_EXHAUSTED: Error writing:\nNo space left on device")

  with monkeypatch.context() as patch:
    patch.setattr(ocp.StandardCheckpointer, "save", fail)
    with pytest.raises(AnystepError) as refused:
      save(model_dir, 9)
  assert (refused.value.code, refused.value.kind) == (74, "checkpoint_write")
  assert (
    refused.value.fields["got"] == "ValueError: RESOURCE_EXHAUSTED: Error writing: No space left on device"
  )
  assert_restored(model_dir, 6)
  save(model_dir, 9)
  assert_restored(model_dir, 9)


def test_a_lost_marker_is_not_taken_for_a_kill_where_no_other_checkpoint_is_left(tmp_path, capsys):
  (save(tmp_path, 3) / checkpoints.COMMITTED).unlink()
  with pytest.raises(AnystepError) as refused:
    checkpoints.find_checkpoint(tmp_path)
  assert (refused.value.code, refused.value.kind) == (65, "checkpoints_unreadable")
  assert "checkpoint_3 was never finished" in capsys.readouterr().err


def test_another_programs_directory_is_not_overwritten(model_dir):
  (model_dir / "checkpoint_9").mkdir()
  (model_dir / "checkpoint_9" / "checkpoint").write_text("not ours")
  with pytest.raises(AnystepError) as refused:
    save(model_dir, 9)
  assert (refused.value.code, refused.value.kind) == (73, "checkpoint_foreign")
  assert (model_dir / "checkpoint_9" / "checkpoint").read_text() == "not ours"


def test_only_the_newest_checkpoints_are_kept_where_that_is_asked(command, tmp_path):
  main.main(command(CHECKPOINTS_KEPT=2))
  assert checkpoints.checkpoint_steps(tmp_path / "model") == [6, 7]


@pytest.mark.parametrize("written", ["some", "all but the marker"])
def test_a_run_that_was_killed_while_it_saved_goes_on_from_the_checkpoint_before(
  written, reference, trained, command, capsys
):
  shutil.rmtree(trained / "checkpoint_7")
  unfinished = trained / "checkpoint_6"
  (unfinished / "commit_success.txt").unlink()
  (unfinished / "unfinished").touch()
  if written == "some":
    shutil.rmtree(unfinished / "state" / "d")
    (unfinished / "integrity.json").unlink()
  capsys.readouterr()
  main.main(command())
  captured = capsys.readouterr()
  assert "checkpoint_6 was never finished" in captured.err
  assert "resumed from checkpoint_3" in captured.out
  comparison = compare_runs(reference, trained)
  assert comparison.identical, comparison.verdict


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(
  reference, trained, command, capsys
):
  flip(largest(trained / "checkpoint_7" / "state"))
  capsys.readouterr()
  main.main(command())
  captured = capsys.readouterr()
  assert "checkpoint_7 cannot be read: ERROR code=65 kind=checkpoint_file" in captured.err
  assert "resumed from checkpoint_6" in captured.out
  assert compare_runs(reference, trained).identical
  # What could not be read is kept for whoever wants to look at it.
  assert len(list(trained.glob("unreadable_checkpoint_7_*"))) == 1


def test_arrays_that_fail_after_the_hashes_held_mean_the_checkpoint_before(
  reference, trained, command, capfd
):
  """As where what the writer hashed was wrong already."""
  for step, spoil in ((7, b"nothing"), (6, b"")):
    largest(trained / f"checkpoint_{step}" / "state").write_bytes(spoil)
    sign(trained / f"checkpoint_{step}")
  capfd.readouterr()
  main.main(command())
  captured = capfd.readouterr()
  for step in (7, 6):
    assert f"checkpoint_{step} cannot be read: ERROR code=65 kind=checkpoint_corrupt" in captured.err
    assert f"checkpoint_{step} is kept as unreadable_checkpoint_{step}_" in captured.err
  assert "Traceback" not in captured.err
  assert "resumed from checkpoint_3" in captured.out
  comparison = compare_runs(reference, trained)
  assert comparison.identical, comparison.verdict


def test_a_run_never_starts_anew_where_no_checkpoint_can_be_restored(trained, command, capsys):
  for step in (3, 6, 7):
    largest(trained / f"checkpoint_{step}" / "state").write_bytes(b"nothing")
    sign(trained / f"checkpoint_{step}")
  with pytest.raises(AnystepError) as refused:
    main.main(command())
  assert (refused.value.code, refused.value.kind) == (65, "checkpoints_unreadable")
  assert sorted(path.name for path in trained.glob("checkpoint_*")) == [f"checkpoint_{s}" for s in (3, 6, 7)]


@pytest.mark.parametrize("version", [1, 2])
def test_a_run_whose_checkpoint_was_renamed_goes_on_from_the_one_before(
  version, reference, trained, command, capsys
):
  if version == 1:
    for step in (3, 6, 7):
      as_version_1(trained / f"checkpoint_{step}")
  shutil.rmtree(trained / "checkpoint_6")
  (trained / "checkpoint_7").rename(trained / "checkpoint_5")
  capsys.readouterr()
  main.main(command())
  captured = capsys.readouterr()
  assert "checkpoint_5 cannot be read: ERROR code=65 kind=checkpoint_step" in captured.err
  assert "resumed from checkpoint_3" in captured.out
  comparison = compare_runs(reference, trained)
  assert comparison.identical, comparison.verdict


@pytest.mark.parametrize("foreign", [["checkpoint"], ["state", "commit_success.txt"], ["integrity.json"]])
def test_another_programs_checkpoints_are_neither_ignored_nor_removed(foreign, command, tmp_path):
  folder = tmp_path / "model" / "checkpoint_3"
  folder.mkdir(parents=True)
  for name in foreign:
    (folder / name).write_text("not ours")
  with pytest.raises(AnystepError) as refused:
    main.main(command())
  assert (refused.value.code, refused.value.kind) == (65, "checkpoints_unreadable")
  assert sorted(path.name for path in folder.iterdir()) == sorted(foreign)
