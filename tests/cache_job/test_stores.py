"""The job on stores: a local one's bytes whatever kills it, one at a time, and no credentials in outputs."""

import hashlib
import os
import signal
import threading
import time

import pytest
import small_tasks  # noqa: F401
from etils import epath
from fault_cases import CACHE_JOB
from fault_runs import AFTER, Fault, Run, zygote
from job_runs import digests_of
from store_servers import servers
from store_servers.bad_proxy import FAULTS
from store_servers.fixtures import SCHEMES, store_root

from anystep.caches.cache import open_cache
from anystep.stores import objects
from anystep.stores.addresses import parse_address

pytestmark = pytest.mark.long
TASK = "small:inner"
SPLITS = ("train", "validation")
FLAGS = (f"--tasks={TASK}", "--module_import=small_tasks", "--num_shards=2")
OLD = (*FLAGS[:2], "--num_shards=3", "--seed=7")
OVERWRITING = (*FLAGS, "--output_format=tfrecord", "--overwrite")


@pytest.fixture(scope="module", params=SCHEMES)
def bucket(request):
  with store_root(request.param) as path:
    yield path


@pytest.fixture(scope="module")
def jobs(bucket):
  # It finds the store in the environment.
  with zygote(*CACHE_JOB) as started:
    yield started


@pytest.fixture
def root(bucket, tmp_path):
  return epath.Path(bucket) / tmp_path.name


@pytest.fixture(scope="module")
def local(jobs, tmp_path_factory):
  """By flags: the files of a local job, as sha256 by relative path."""
  folder = tmp_path_factory.mktemp("local")
  digests = {}
  for number, flags in enumerate((FLAGS, OVERWRITING)):
    path = folder / str(number)
    assert jobs.run(job_run(path, flags)).status == 0
    digests[flags] = digests_of(path)
  return digests


def job_run(root, flags=FLAGS, **disturbed):
  return Run(
    program="anystep.cache_job.main",
    arguments=(f"--output_cache_dir={root}", *flags),
    root=root,
    **disturbed,
  )


def contents_of(root):
  address = parse_address(root)
  return {name: epath.Path(root / name).read_bytes() for name in objects.list_below(address)}


def digests_on(root):
  return {name: hashlib.sha256(content).hexdigest() for name, content in contents_of(root).items()}


def test_a_job_s_bytes_are_those_of_a_local_one_and_no_output_has_credentials(jobs, local, root):
  ended = jobs.run(job_run(root))
  assert ended.status == 0, ended.stderr
  contents = contents_of(root)
  assert digests_on(root) == local[FLAGS]
  for split in SPLITS:
    open_cache(root, TASK, split).verify()
  again = jobs.run(job_run(root))
  assert (again.status, digests_on(root)) == (0, local[FLAGS])
  for output in (ended.stderr.encode(), again.stderr.encode(), *contents.values()):
    assert servers.ACCESS_KEY.encode() not in output
    assert servers.SECRET_KEY.encode() not in output
  # The first object is the lock; the last that readers look for is the marker.
  assert ended.operations[0] == ("put_if_absent", "small/inner/.lock")
  assert [name for _, name in ended.operations if "/." not in name][-1] == "small/inner/COMPLETED"


def test_a_cache_takes_the_place_of_an_old_one(jobs, local, root):
  assert jobs.run(job_run(root, OLD)).status == 0
  ended = jobs.run(job_run(root, OVERWRITING))
  assert ended.status == 0, ended.stderr
  assert digests_on(root) == local[OVERWRITING]
  # No file of the old cache changes as long as readers find it complete.
  names = [name for _, name in ended.operations]
  marker = names.index("small/inner/COMPLETED")
  assert not [name for name in names[:marker] if "/." not in name]


def test_a_second_job_is_refused_with_the_first_one_s_name(jobs, local, root, tmp_path):
  hold = tmp_path / "hold"
  first = []
  fault = Fault(path="spill-.*json", hold=hold)
  thread = threading.Thread(target=lambda: first.append(jobs.run(job_run(root, fault=fault))))
  thread.start()
  try:
    while not hold.exists():
      assert thread.is_alive()
      time.sleep(0.05)
    second = jobs.run(job_run(root))
  finally:
    hold.unlink(missing_ok=True)
    thread.join()
  assert second.status == 73
  assert f"kind=job_running path={root}/small/inner/.lock host={os.uname().nodename} pid=" in second.stderr
  assert first[0].status == 0, first[0].stderr
  assert digests_on(root) == local[FLAGS]


@pytest.fixture(scope="module")
def operations(jobs, bucket):
  """What a job that nothing disturbs changes, by flags."""
  path = epath.Path(bucket) / "undisturbed"
  changes = {FLAGS: jobs.run(job_run(path)).operations}
  assert jobs.run(job_run(path, (*OLD, "--overwrite"))).status == 0
  changes[OVERWRITING] = jobs.run(job_run(path, OVERWRITING)).operations
  return changes


@pytest.mark.parametrize("flags", [FLAGS, OVERWRITING], ids=["first", "overwriting"])
def test_a_killed_job_is_finished_by_the_same_command(jobs, local, operations, root, flags, capsys):
  last = len(operations[flags]) - 1
  kill_and_finish(jobs, local, root, flags, [last // 4, last // 2, 3 * last // 4], capsys)


@pytest.mark.soak
@pytest.mark.parametrize("flags", [FLAGS, OVERWRITING], ids=["first", "overwriting"])
def test_a_job_that_is_killed_before_any_change_is_finished(jobs, local, operations, root, flags, capsys):
  kill_and_finish(jobs, local, root, flags, range(len(operations[flags])), capsys)


def kill_and_finish(jobs, local, root, flags, places, capsys):
  faults = [Fault(at=place) for place in places]
  faults.append(Fault(path="COMPLETED", when=AFTER))
  for number, fault in enumerate(faults):
    place = root / str(number)
    if flags == OVERWRITING:
      assert jobs.run(job_run(place, OLD)).status == 0
    killed = jobs.run(job_run(place, flags, fault=fault))
    assert killed.status == -signal.SIGKILL, (fault, killed)
    assert_nothing_torn(place, local[flags])
    ended = jobs.run(job_run(place, flags))
    assert ended.status == 0, (fault, ended.stderr)
    assert digests_on(place) == local[flags], fault
    place.rmtree()
  with capsys.disabled():
    scheme = parse_address(root).scheme
    print(f"\n{len(faults)} of {len(faults)} kills on {scheme}://: all finished to the same bytes")


def assert_nothing_torn(root, finished):
  """A cache whose marker is there is whole."""
  digests = digests_on(root)
  if digests.get("small/inner/COMPLETED") == finished["small/inner/COMPLETED"]:
    assert digests.items() >= finished.items()
  elif "small/inner/COMPLETED" in digests:
    for split in SPLITS:
      open_cache(root, TASK, split).verify()


def test_what_killed_uploads_left_is_removed_by_the_next_job(jobs, local, root):
  if parse_address(root).scheme != "s3":
    pytest.skip("GCS keeps no parts")
  address = parse_address(root / "small/inner/train.array_record-00000-of-00002")
  servers_client = clients_of(address)
  upload = servers_client.create_multipart_upload(Bucket=address.bucket, Key=address.key)
  part = {"Bucket": address.bucket, "Key": address.key, "UploadId": upload["UploadId"], "PartNumber": 1}
  servers_client.upload_part(**part, Body=b"half a shard")
  assert jobs.run(job_run(root)).status == 0
  assert "Uploads" not in servers_client.list_multipart_uploads(Bucket=address.bucket)
  assert digests_on(root) == local[FLAGS]


def clients_of(address):
  from anystep.stores.clients import open_s3_client

  return open_s3_client(address)


# Each kind at a tenth of the requests; stores take so much now and then.
SPOILED = ["reset", *(pytest.param(kind, marks=pytest.mark.soak) for kind in sorted({*FAULTS} - {"reset"}))]


@pytest.mark.parametrize("kind", SPOILED)
def test_a_job_finishes_through_what_real_stores_do(bucket, local, tmp_path, monkeypatch, kind):
  if not bucket.startswith("s3"):
    pytest.skip("the proxy stands before S3")
  endpoint = os.environ["AWS_ENDPOINT_URL"]
  # Only lists can be stale, and there are few.
  with servers.bad_proxy(endpoint, {kind: 0.4 if kind == "stale" else 0.1}) as proxy:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy)
    root = epath.Path(bucket) / tmp_path.name
    with zygote(*CACHE_JOB) as jobs:
      ended = jobs.run(job_run(root))
    assert ended.status == 0, ended.stderr
    assert servers.count_faults(proxy)[kind] > 5
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
  assert digests_on(root) == local[FLAGS]
