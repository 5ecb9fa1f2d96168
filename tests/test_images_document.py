"""What docs/images.md shows works as it says, and any number of workers gives the same pictures."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from absl import flags
from pictures import pixels_of, write_pictures

import anystep
from anystep.features.digest import batch_digest

# The cache job of its folder takes longer than the rest.
pytestmark = pytest.mark.long
DOCUMENT = (Path(__file__).parents[1] / "docs" / "images.md").read_text(encoding="utf-8")
NUM_PICTURES = 90
MODULES = ("my_images", "my_pictures")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A folder with the document's modules, files and cache, which Python imports from."""
  import seqio

  from anystep.cache_job.main import main

  folder = tmp_path_factory.mktemp("images")
  (folder / "data").mkdir()
  write_pictures(folder / "data", NUM_PICTURES)
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(folder)
    patch.syspath_prepend(str(folder))
    for name, block in re.findall(r"^```python file=(my_\w+)\.py\n(.*?)^```$", DOCUMENT, re.M | re.S):
      (folder / f"{name}.py").write_text(block)
    (command,) = re.findall(r"^anystep-cache .*", DOCUMENT, re.M)
    assert main(command.split()) == 0
    if not flags.FLAGS.is_parsed():
      flags.FLAGS.mark_as_parsed()
    yield folder
  seqio.TaskRegistry.remove("my_images")
  for name in MODULES:
    sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def scope(folder):
  """The names that the document's blocks leave."""
  names: dict = {}
  blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.M | re.S)
  assert len(blocks) == 2
  for number, block in enumerate(blocks):
    exec(compile(block, f"images.md, block {number}", "exec"), names)
  return names


@pytest.fixture(scope="module")
def expected(scope):
  """Digests of all batches, each read alone."""
  with anystep.open_stream(scope["plan"], "cache", transforms=scope["transforms"]) as stream:
    return [batch_digest(stream.batch(step)) for step in range(scope["plan"].num_steps)]


def test_pixels_are_crops_of_the_pictures(scope):
  batch = scope["batch"]
  assert (batch["image"].shape, batch["image"].dtype) == ((16, 32, 32, 3), np.uint8)
  exact = 0
  for pixels, label in zip(batch["image"], batch["label"].tolist(), strict=True):
    if label % 2 == 0:
      windows = np.lib.stride_tricks.sliding_window_view(pixels_of(label), pixels.shape)
      assert any((windows == view).all(axis=(3, 4, 5)).any() for view in (pixels, pixels[:, ::-1]))
      exact += 1
  assert exact > 3


def test_every_epoch_has_every_picture_in_another_crop(scope):
  epochs: list[dict[int, bytes]] = [{}, {}]
  with anystep.open_stream(scope["plan"], "cache", transforms=scope["transforms"]) as stream:
    for step, batch in enumerate(stream):
      rows = scope["plan"].batch(step)
      for row in np.flatnonzero(rows.task >= 0):
        epochs[rows.epoch[row]][int(batch["label"][row])] = batch["image"][row].tobytes()
  assert epochs[0].keys() == epochs[1].keys() == set(range(NUM_PICTURES))
  assert sum(epochs[0][label] == epochs[1][label] for label in epochs[0]) < NUM_PICTURES / 10


@pytest.mark.parametrize("num_workers", [0, 1, 4])
def test_any_number_of_grains_workers_gives_the_same_pictures(scope, expected, num_workers):
  dataset = scope["batches"]
  if num_workers:
    options = scope["grain"].multiprocessing.MultiprocessingOptions(num_workers=num_workers)
    dataset = dataset.mp_prefetch(options)
  assert [batch_digest(batch) for batch in dataset] == expected
