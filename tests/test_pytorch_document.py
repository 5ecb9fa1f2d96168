"""What docs/pytorch.md shows works, in its order, over a small cache; `make test-torch` runs this."""

import os
import re
from pathlib import Path

import caches
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; `make test-torch` has it")

DOCUMENT = (Path(__file__).parents[1] / "docs" / "pytorch.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def scope(tmp_path_factory):
  """The names that the document's blocks leave, in the folder that they ran in."""
  folder = tmp_path_factory.mktemp("document")
  caches.build(folder / "cache", task="c4", num_examples=300, num_shards=4)
  before = os.getcwd()
  os.chdir(folder)
  names: dict = {}
  try:
    blocks = re.findall(r"^```python torch\n(.*?)^```$", DOCUMENT, re.M | re.S)
    assert len(blocks) >= 7
    for number, block in enumerate(blocks):
      exec(compile(block, f"pytorch.md, block {number}", "exec"), names)
    yield names
  finally:
    os.chdir(before)


def test_the_documents_python_runs(scope):
  assert scope["batch"]["inputs"].shape == (8, 16)
  inputs, labels = scope["inputs"], scope["labels"]
  assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (4, 32)


def test_torchtitans_loader_is_resumed_by_torchs_checkpoints_with_another_number_of_ranks(scope, tmp_path):
  from torch.distributed import checkpoint
  from torchtitan.components.dataloader import BaseDataLoader
  from torchtitan.components.loss import IGNORE_INDEX

  assert scope["IGNORE_INDEX"] == IGNORE_INDEX

  def build(dp_rank, dp_world_size):
    return scope["config"].build(
      dp_rank=dp_rank,
      dp_world_size=dp_world_size,
      tokenizer=None,
      seq_len=32,
      local_batch_size=8 // dp_world_size,
      snapshot_every_n_steps=5,
    )

  loader = build(1, 2)
  assert isinstance(loader, BaseDataLoader)
  batches = iter(loader)
  for _ in range(3):
    next(batches)
  checkpoint.save({"dataloader": loader}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
  inputs, labels = next(batches)

  whole = build(0, 1)
  checkpoint.load({"dataloader": whole}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
  assert whole.state_dict() == {"step": 3}
  rest = list(whole)
  all_inputs, all_labels = rest[0]
  assert (all_labels[4:] == labels).all()
  assert all((all_inputs[name][4:] == inputs[name]).all() for name in inputs)
  padding = torch.cat([labels == IGNORE_INDEX for _, labels in rest])
  assert 0 < padding.sum() < padding.numel() / 2
