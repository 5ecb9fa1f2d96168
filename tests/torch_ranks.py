"""A rank of torch.distributed that reads its rows of a plan, for tests that start several."""

import json
import pathlib
import sys

import torch
from torch.utils.data import DataLoader

import anystep
from anystep.torch import StepDataset, StreamDataset


def arrays_of(batch):
  """A batch of tensors as arrays."""
  return {name: value.numpy() if torch.is_tensor(value) else value for name, value in batch.items()}


def main(folder, rank, num_ranks, num_workers, start_step, *explicit):
  """Write the digests of a rank's rows, by step, as JSON; with explicit rows where they are given."""
  folder = pathlib.Path(folder)
  plan = anystep.Plan.from_json((folder / "plan.json").read_text())
  torch.distributed.init_process_group(
    "gloo", init_method=f"file://{folder}/group-{num_ranks}", rank=int(rank), world_size=int(num_ranks)
  )
  rows = tuple(map(int, explicit)) or None
  streamed = DataLoader(
    StreamDataset(plan, folder / "cache", rows=rows, start_step=int(start_step)),
    batch_size=None,
    num_workers=int(num_workers),
    multiprocessing_context="fork" if int(num_workers) else None,
  )
  by_step = StepDataset(plan, folder / "cache", rows=rows)
  digests = []
  for step, batch in enumerate(streamed, int(start_step)):
    digests.append([digest.hex() for digest in anystep.row_digests(arrays_of(batch))])
    assert digests[-1] == [digest.hex() for digest in anystep.row_digests(arrays_of(by_step[step]))]
  # Ranks that did not read the same number of steps would wait here for ever.
  torch.distributed.barrier()
  torch.distributed.destroy_process_group()
  (folder / f"rows-{rank}-of-{num_ranks}.json").write_text(json.dumps(digests))


if __name__ == "__main__":
  main(*sys.argv[1:])
