"""What an earlier job left is taken up where it would be made again as it is, and nowhere else."""

import pytest
import small_tasks
from job_runs import digests_of, registered, run_job

from anystep.errors import AnystepError

SIZES = {"train": (5, 4)}


def task(**changes):
  return small_tasks.task("small_resumed", sizes=SIZES, **changes)


@pytest.fixture
def begun(tmp_path, monkeypatch):
  """A cache whose job ended in its second source shard."""
  monkeypatch.setenv("SMALL_TASKS_RAISE_AT", "train-1-2")
  with registered(task()), pytest.raises(AnystepError, match="preprocessor_failed"):
    run_job(tmp_path / "cache", tasks="small_resumed")
  monkeypatch.delenv("SMALL_TASKS_RAISE_AT")
  monkeypatch.setenv("SMALL_TASKS_LOG", str(tmp_path / "log"))
  return tmp_path / "cache"


def source_shards_done(cache_dir):
  return {line.rpartition("-")[0] for line in (cache_dir.parent / "log").read_text().split()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  cache_dir = tmp_path_factory.mktemp("undisturbed")
  with registered(task()):
    run_job(cache_dir, tasks="small_resumed")
  return digests_of(cache_dir)


def test_a_job_goes_on_with_what_is_finished(begun, undisturbed):
  with registered(task()):
    run_job(begun, tasks="small_resumed")
  assert source_shards_done(begun) == {"train-1"}
  assert digests_of(begun) == undisturbed


def test_a_job_that_is_told_so_starts_anew(begun, undisturbed):
  with registered(task()):
    run_job(begun, "--noresume", tasks="small_resumed")
  assert source_shards_done(begun) == {"train-0", "train-1"}
  assert digests_of(begun) == undisturbed


def test_a_job_does_not_go_on_from_another_source(begun, undisturbed, monkeypatch):
  """Half of the examples would be of one, half of the other."""
  monkeypatch.setattr("anystep.tasks.registry.fingerprint._find_version", lambda name: f"another {name}")
  with registered(task()):
    with pytest.raises(AnystepError) as caught:
      run_job(begun, tasks="small_resumed")
    assert (caught.value.code, caught.value.kind) == (76, "provenance_changed")
    fields = caught.value.fields
    assert fields["item"] == "libraries.anystep"
    assert fields["got"] == "another anystep"
    assert "--noresume" in caught.value.fix
    assert not (begun.parent / "log").exists()
    run_job(begun, "--noresume", tasks="small_resumed")
  assert source_shards_done(begun) == {"train-0", "train-1"}
  data = {name: digest for name, digest in digests_of(begun).items() if "manifest" not in name}
  assert data.items() >= {n: d for n, d in undisturbed.items() if ".array_record-" in n}.items()


@pytest.mark.parametrize("flags", [["--base_seed=1"], ["--range_examples=3"], ["--cache_at=end"]])
def test_a_job_takes_nothing_that_was_made_otherwise(begun, flags):
  if flags == ["--cache_at=end"]:
    flags.append('--task_feature_lengths={"targets": 8}')
  with registered(task()):
    run_job(begun, *flags, tasks="small_resumed")
  assert source_shards_done(begun) == {"train-0", "train-1"}


def test_a_spill_that_was_cut_short_is_made_again(begun, undisturbed):
  (finished,) = begun.glob("small_resumed/.building/*/spill-00000.json")
  (spill,) = (path for path in finished.parent.glob("spill-00000.*") if path.suffix != ".json")
  spill.write_bytes(spill.read_bytes()[:-1])
  with registered(task()):
    run_job(begun, tasks="small_resumed")
  assert source_shards_done(begun) == {"train-0", "train-1"}
  assert digests_of(begun) == undisturbed


def test_a_spill_with_a_flipped_bit_ends_the_job_and_a_new_start_helps(begun, undisturbed):
  (finished,) = begun.glob("small_resumed/.building/*/spill-00000.json")
  (spill,) = (path for path in finished.parent.glob("spill-00000.*") if path.suffix != ".json")
  content = bytearray(spill.read_bytes())
  content[len(content) // 2] ^= 1
  spill.write_bytes(bytes(content))
  with registered(task()):
    with pytest.raises(AnystepError, match="spill_corrupt") as caught:
      run_job(begun, tasks="small_resumed")
    assert caught.value.code == 65
    run_job(begun, "--noresume", tasks="small_resumed")
  assert digests_of(begun) == undisturbed
