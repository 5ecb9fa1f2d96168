"""PyTorch sees a plan's batches as datasets; `make test-torch` runs this, for it needs torch.

Where torch is not installed, `import anystep.torch` says so: tests/library/test_imports.py has that.
"""

import itertools
import json
import pathlib
import pickle
import re
import subprocess
import sys
import types

import caches
import numpy as np
import pytest
from expected_rows import ExpectedRows

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make test-torch` has it")

import ml_dtypes  # noqa: E402
from pictures import encoded_picture  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from torch_ranks import arrays_of  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

import anystep  # noqa: E402
import anystep.torch  # noqa: E402
from anystep.errors import AnystepError  # noqa: E402
from anystep.features.feature import Feature  # noqa: E402
from anystep.torch import StepDataset, StreamDataset, to_tensors  # noqa: E402

pytestmark = [
  pytest.mark.filterwarnings("ignore:This DataLoader will create"),
  pytest.mark.filterwarnings("ignore:'pin_memory' argument"),
  # Python's, where a process with threads forks: streams start anew in the child.
  pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]
ROOT = pathlib.Path(__file__).parents[2]
# Ways to start a loader's workers, and numbers of workers; without workers there is one way.
LOADERS = [(0, None), *itertools.product((1, 3), ("fork", "spawn", "forkserver"))]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  root = tmp_path_factory.mktemp("run") / "cache"
  sizes = {"a": (50, 4), "b": (57, 2), "c": (64, 1)}
  return {
    name: caches.build(root, task=name, num_examples=examples, num_shards=shards)
    for name, (examples, shards) in sizes.items()
  }


@pytest.fixture(scope="module")
def root(built):
  return built["a"].root


def start(built, **options):
  """A plan of a mixture whose batch size changes and whose last batch has padding."""
  plan = anystep.Plan.start(
    [cache.open() for cache in built.values()],
    rates={"a": 1, "b": 2, "c": 5},
    batch_size=8,
    feature_lengths=caches.FEATURE_LENGTHS,
    **options,
  )
  return plan.change(3, batch_size=4)


@pytest.fixture(scope="module")
def plan(built):
  return start(built, num_epochs=1)


@pytest.fixture(scope="module")
def expected(plan, built):
  """Digests by step, as the oracle places examples and torch's dtypes for them are."""
  rows = ExpectedRows(plan, built.values())
  return [caches.oracle_digest(widened(rows.batch(step))) for step in range(rows.num_steps)]


def widened(rows):
  return [
    {name: value.astype(np.int64) if value.dtype == np.int32 else value for name, value in row.items()}
    for row in rows
  ]


def digests(batches):
  return [anystep.batch_digest(arrays_of(batch)) for batch in batches]


def test_steps_are_items_and_a_stream_gives_them_in_order(plan, root, expected):
  assert digests(StreamDataset(plan, root)) == expected
  by_step = StepDataset(plan, root)
  backwards = [anystep.batch_digest(arrays_of(by_step[step])) for step in reversed(range(len(expected)))]
  assert backwards[::-1] == expected == digests(by_step)


@pytest.mark.parametrize(("num_workers", "method"), LOADERS)
def test_any_number_of_workers_however_started_gives_the_same_and_resumes(
  plan, root, expected, num_workers, method
):
  options = {"batch_size": None, "num_workers": num_workers, "multiprocessing_context": method}
  loader = StatefulDataLoader(StreamDataset(plan, root), **options)
  middle = len(expected) // 2
  batches = iter(loader)
  first = digests(itertools.islice(batches, middle))
  state = pickle.dumps(loader.state_dict())
  assert first + digests(batches) == expected

  resumed = StatefulDataLoader(StreamDataset(plan, root), **options)
  resumed.load_state_dict(pickle.loads(state))
  assert digests(resumed) == expected[middle:]

  from_step = DataLoader(StreamDataset(plan, root, start_step=middle), **options)
  assert len(from_step) == len(expected) - middle
  assert digests(from_step) == expected[middle:]

  by_step = DataLoader(StepDataset(plan, root), sampler=range(middle, len(expected)), **options)
  assert digests(by_step) == expected[middle:]


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 13])
def test_workers_take_turns_at_steps_from_any_step_on(plan, root, expected, monkeypatch, num_workers):
  for start_step in range(len(expected) + 2):
    dataset = StreamDataset(plan, root, start_step=start_step, prefetch_batches=0)
    workers = []
    for number in range(num_workers):
      worker = types.SimpleNamespace(id=number, num_workers=num_workers)
      monkeypatch.setattr(anystep.torch, "get_worker_info", lambda worker=worker: worker)
      workers.append(iter(dataset))
    # A loader asks its workers in turn, and no longer those that have ended.
    batches = []
    while workers:
      for worker in list(workers):
        try:
          batches.append(next(worker))
        except StopIteration:
          workers.remove(worker)
    assert digests(batches) == expected[start_step:]
    assert len(dataset) == len(batches)


def test_an_iterator_resumes_at_every_step(plan, root, expected):
  iterator = iter(StreamDataset(plan, root))
  for step in range(len(expected) + 1):
    state = json.loads(json.dumps(iterator.state_dict()))
    other = iter(StreamDataset(plan, root, prefetch_batches=0))
    other.load_state_dict(state)
    assert digests(other) == expected[step:]
    if step < len(expected):
      assert digests([next(iterator)]) == [expected[step]]
  iterator.close()
  with pytest.raises(AnystepError) as refused:
    iterator.load_state_dict({"step": 3})
  assert (refused.value.code, refused.value.kind) == (76, "stream_state")


def test_an_endless_plan_has_no_length(built, root):
  endless = start(built)
  stream, by_step = StreamDataset(endless, root), StepDataset(endless, root)
  for dataset in (stream, by_step, DataLoader(stream, batch_size=None)):
    with pytest.raises(TypeError, match="no last step"):
      len(dataset)
  loader = DataLoader(by_step, batch_size=None, sampler=itertools.count(1000))
  far = DataLoader(StreamDataset(endless, root, start_step=1000), batch_size=None)
  assert digests(itertools.islice(loader, 3)) == digests(itertools.islice(far, 3))


@pytest.mark.parametrize("step", [-1, 10**6])
def test_a_step_that_the_plan_does_not_have_is_no_item(plan, root, step):
  with pytest.raises(IndexError, match=f"step {step} of a plan of {plan.num_steps} steps"):
    StepDataset(plan, root)[step]


@pytest.mark.parametrize("step", [-1, 0.5, True])
def test_a_first_step_is_a_step(plan, root, step):
  with pytest.raises((ValueError, TypeError, AnystepError)):
    StreamDataset(plan, root, start_step=step)


def test_dtypes_are_those_that_torch_computes_with():
  values = [0, 1, 3]
  same = [np.bool_, np.uint8, np.int8, np.int16, np.int64, np.uint64, np.float16, np.float32, np.float64]
  arrays = {np.dtype(dtype).name: np.array(values, dtype) for dtype in same}
  tensors = to_tensors(arrays)
  for name, tensor in tensors.items():
    assert tensor.dtype == getattr(torch, name)
    assert tensor.numpy().base is arrays[name] or np.shares_memory(tensor.numpy(), arrays[name])
    assert np.array_equal(tensor.numpy(), arrays[name])
  for dtype in (np.int32, np.uint16, np.uint32):
    largest = np.iinfo(dtype).max
    (tensor,) = to_tensors({"x": np.array([*values, largest], dtype)}).values()
    assert (tensor.dtype, tensor.tolist()) == (torch.int64, [*values, largest])
  (tensor,) = to_tensors({"x": np.array([0.5, -3], ml_dtypes.bfloat16)}).values()
  assert (tensor.dtype, tensor.tolist()) == (torch.bfloat16, [0.5, -3])


def test_losses_and_embeddings_take_the_tokens(plan, root):
  tokens = next(iter(StreamDataset(plan, root)))["targets"]
  table = torch.nn.Embedding(2000, 3)
  assert table(tokens).shape == (8, 4, 3)
  logits = torch.zeros(8, 2000, 4)
  assert torch.nn.functional.cross_entropy(logits, tokens).item() == pytest.approx(np.log(2000), abs=1e-3)


def test_what_no_tensor_holds_passes_as_it_is(built, root):
  texts = {"a": anystep.Map(with_text)}
  plan = anystep.Plan.start(
    built["a"].open(), batch_size=8, feature_lengths={"inputs": 5}, transforms=texts, num_epochs=1
  )
  dataset = StreamDataset(plan, root, transforms=texts)
  with anystep.open_stream(plan, root, transforms=texts) as stream:
    expected = next(stream)
  # Pinned where there is an accelerator; elsewhere torch warns and leaves it out.
  for options in ({}, {"pin_memory": True}, {"num_workers": 1, "multiprocessing_context": "fork"}):
    batch = next(iter(DataLoader(dataset, batch_size=None, **options)))
    assert batch.keys() == expected.keys()
    assert batch["text"].tolist() == expected["text"].tolist()
    assert isinstance(batch["targets"], type(expected["targets"]))
    assert np.array_equal(batch["targets"].values, expected["targets"].values)
    assert torch.is_tensor(batch["inputs"])
    assert batch["inputs"].is_pinned() == (torch.cuda.is_available() and "pin_memory" in options)


def with_text(example):
  return {**example, "text": b"number %d" % example["number"]}


PICTURES = {"image": Feature(dtype="string", shape=()), "label": Feature(dtype="int64", shape=())}


def picture_of(ordinal):
  return {"image": np.array(encoded_picture(ordinal), object), "label": np.int64(ordinal)}


def test_any_number_of_workers_decodes_the_same_pictures(tmp_path, monkeypatch):
  document = (ROOT / "docs/images.md").read_text(encoding="utf-8")
  (module,) = re.findall(r"^```python file=my_pictures\.py\n(.*?)^```$", document, re.M | re.S)
  (tmp_path / "my_pictures.py").write_text(module)
  monkeypatch.syspath_prepend(str(tmp_path))
  import my_pictures

  cache = caches.build(tmp_path / "cache", features=PICTURES, example_of=picture_of)
  transforms = {"demo": anystep.RandomMap(my_pictures.decode_and_crop)}
  plan = anystep.Plan.start(
    cache.open(), batch_size=8, feature_lengths={"image": 32}, transforms=transforms, num_epochs=2
  )
  dataset = StreamDataset(plan, cache.root, transforms=transforms)
  without_workers = list(dataset)
  assert without_workers[0]["image"].dtype == torch.uint8
  assert without_workers[0]["image"].shape == (8, 32, 32, 3)
  for num_workers, method in ((1, "fork"), (4, "fork"), (1, "spawn")):
    loader = DataLoader(dataset, batch_size=None, num_workers=num_workers, multiprocessing_context=method)
    assert digests(loader) == digests(without_workers)


def test_two_ranks_read_the_rows_of_a_batch_between_them(plan, built, expected, tmp_path):
  (tmp_path / "cache").symlink_to(built["a"].root)
  (tmp_path / "plan.json").write_text(plan.to_json())
  rows = ExpectedRows(plan, built.values())
  by_step = [anystep.row_digests(_stacked(widened(rows.batch(step)))) for step in range(len(expected))]

  def run(num_ranks, *, num_workers, start_step, explicit=()):
    program = [sys.executable, ROOT / "tests/torch_ranks.py", tmp_path]
    ranks = [
      subprocess.Popen([*program, *map(str, (rank, num_ranks, num_workers, start_step, *explicit))])
      for rank in range(num_ranks)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0] * num_ranks
    read = [
      json.loads((tmp_path / f"rows-{rank}-of-{num_ranks}.json").read_text()) for rank in range(num_ranks)
    ]
    return [[bytes.fromhex(row) for rows in step for row in rows] for step in zip(*read, strict=True)]

  # Two ranks of two workers each; then one rank goes on from the middle.
  assert run(2, num_workers=2, start_step=0) == by_step
  assert run(1, num_workers=0, start_step=4) == by_step[4:]
  (tmp_path / "group-2").unlink(missing_ok=True)
  # Ranks that share their rows, as those of tensor parallelism do.
  both = run(2, num_workers=0, start_step=len(expected) - 2, explicit=(1, 4))
  last = [step[len(step) // 4 : len(step) // 2] for step in by_step[-2:]]
  assert both == [step + step for step in last]


def _stacked(rows):
  return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def test_a_rank_without_a_process_group_is_refused(plan, root, monkeypatch):
  monkeypatch.setenv("WORLD_SIZE", "2")
  for dataset in (StreamDataset, StepDataset):
    with pytest.raises(AnystepError) as refused:
      dataset(plan, root)
    assert (refused.value.code, refused.value.kind) == (78, "process_group")
    assert "rows=" in refused.value.fix
  assert len(next(iter(StreamDataset(plan, root, rows=(1, 2))))["inputs"]) == 4
  monkeypatch.setenv("WORLD_SIZE", "1")
  assert len(next(iter(StreamDataset(plan, root)))["inputs"]) == 8


def test_rows_are_refused_before_a_worker_starts(plan, root):
  for dataset in (StreamDataset, StepDataset):
    with pytest.raises(AnystepError) as refused:
      dataset(plan, root, rows=(0, 3))
    assert (refused.value.code, refused.value.kind) == (78, "rows")


def test_a_dataset_that_was_read_goes_to_workers_without_its_stream(plan, root, expected):
  dataset = StepDataset(plan, root, rows=iter(range(4)))
  before = digests([dataset[0]])
  copy = pickle.loads(pickle.dumps(dataset))
  assert digests([copy[0], dataset[0]]) == before * 2
