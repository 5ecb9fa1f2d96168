"""The process forks in any state of its readers and streams; children and parent read on."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from attacks.attack import HARMLESS, HUNG, REFUSED, Attempt, Chance, Wrong
from attacks.targets import BLOCK_RECORDS, SPLIT, TARGETS, TASK, Target

from anystep.caches.cache import Cache, open_cache
from anystep.caches.read_pool import ReadPool
from anystep.errors import AnystepError
from anystep.features.digest import batch_digest
from anystep.plans.plan import Plan
from anystep.streams.stream import Stream, open_stream

_WAIT_SECONDS = 10
_TARGETS = ("array_record", "tfrecord", "parquet as_is", "packed")
_FORK = multiprocessing.get_context("fork")
_REFUSED, _WRONG, _RAW = 3, 4, 5


class State:
  """A process's open caches and streams of a target.

  Attributes:
    cache: whose file readers are open. stream: has taken some batches, and reads ahead.
    numbers: what the cache's examples are told by, by index.
  """

  def __init__(self, target: Target, numbers: Sequence[int]):
    self.target, self.numbers = target, numbers
    self.cache = open_cache(target.root, TASK, SPLIT, pool=ReadPool())
    self.stream: Stream | None = None

  def check(self, cache: Cache, indices: Sequence[int]) -> None:
    """Compares examples with the truth."""
    for index, example in zip(indices, cache.__getitems__(list(indices)), strict=True):
      if int(example["number"]) != self.numbers[index]:
        raise Wrong(f"example {index} is {example['number']}, not {self.numbers[index]}")

  def take(self, count: int) -> None:
    """Takes batches and compares them; value 0 of the target is not a batch."""
    assert self.stream is not None
    for _ in range(count):
      step = self.stream.step
      if batch_digest(next(self.stream)) != self.target.truth[1 + step]:
        raise Wrong(f"the batch of step {step} is another")


def prepare(folder: pathlib.Path) -> Attempt:
  """Makes the files and returns the attempt."""
  targets = {name: TARGETS[name](folder / f"{name} files", 0) for name in _TARGETS}
  plans, numbers = {}, {}
  for name, target in targets.items():
    cache = open_cache(target.root, TASK, SPLIT, pool=ReadPool())
    numbers[name] = [int(cache[index]["number"]) for index in range(len(cache))]
    order = {"packing": "greedy", "feature_lengths": {"tokens": 256}} if name == "packed" else {}
    plans[name] = Plan.start(cache, batch_size=8, num_epochs=2, epoch_policy="reshuffle", **order).to_json()

  def attempt(chance: Chance) -> str:
    name = chance.choice(_TARGETS)
    state = State(targets[name], numbers[name])
    read, prefetch, taken = chance.choice([0, 1, 20]), chance.choice([None, 0, 4, 16]), chance.randint(0, 3)
    kind, after_seconds = (
      chance.choice(list(CHILDREN)),
      chance.choice([0, 0, 0.0005, 0.003]) * chance.random(),
    )
    chance.note(f"{name}: {read} records read, {taken} batches taken with {prefetch} ahead: {kind}")
    indices = chance.sample(range(len(state.cache)), BLOCK_RECORDS)
    for index in range(read):
      state.check(state.cache, [index])
    if prefetch is not None:
      plan = Plan.from_json(plans[name])
      state.stream = open_stream(plan, {TASK: state.cache}, prefetch_batches=prefetch)
      state.take(taken)
      time.sleep(after_seconds)
    try:
      outcomes = set(CHILDREN[kind](state, indices))
      # The parent is not disturbed.
      state.check(state.cache, indices)
      if state.stream is not None:
        state.take(2)
    finally:
      if state.stream is not None:
        state.stream.close()
    for outcome in (HUNG, REFUSED):
      if outcome in outcomes:
        return outcome
    return HARMLESS

  return attempt


def _in_child(do: Callable[[], object]) -> str:
  """What came of doing it in a child of a fork."""
  reading, writing = os.pipe()
  pid = os.fork()
  if pid == 0:
    status, said = 0, ""
    try:
      do()
    except AnystepError:
      status = _REFUSED
    except Wrong as error:
      status, said = _WRONG, str(error)
    except BaseException as error:
      status, said = _RAW, f"{type(error).__name__}: {error}"
    finally:
      os.write(writing, said.encode()[:500])
      os._exit(status)
  os.close(writing)
  try:
    status = _wait(pid)
    said = os.read(reading, 500).decode() if status in (_WRONG, _RAW) else ""
  finally:
    os.close(reading)
  if status is None:
    return HUNG
  if status == _WRONG:
    raise Wrong(f"a child: {said}")
  if status not in (0, _REFUSED):
    raise RuntimeError(f"a child ended with {status}: {said}")
  return REFUSED if status else HARMLESS


def _wait(pid: int) -> int | None:
  """A child's status; None where it did not end in time."""
  end = time.monotonic() + _WAIT_SECONDS
  while time.monotonic() < end:
    found, status = os.waitpid(pid, os.WNOHANG)
    if found:
      return os.waitstatus_to_exitcode(status)
    time.sleep(0.001)
  os.kill(pid, signal.SIGKILL)
  os.waitpid(pid, 0)
  return None


def _reads_its_own(state: State, indices: Sequence[int]) -> Iterator[str]:
  """Opens a cache of its own."""
  yield _in_child(lambda: state.target.check(state.target.read(state.target.root)))


def _reads_the_parents(state: State, indices: Sequence[int]) -> Iterator[str]:
  """Reads of the cache that the parent opened."""
  yield _in_child(lambda: state.check(state.cache, indices))


def _takes_the_parents(state: State, indices: Sequence[int]) -> Iterator[str]:
  """Goes on with the stream that the parent opened, or with its cache where there is none."""
  yield _in_child(lambda: state.check(state.cache, indices) if state.stream is None else state.take(3))


def _closes_the_parents(state: State, indices: Sequence[int]) -> Iterator[str]:
  """Closes the stream that the parent opened, and reads."""

  def close() -> None:
    if state.stream is not None:
      state.stream.close()
    state.check(open_cache(state.target.root, TASK, SPLIT, pool=ReadPool()), indices)

  yield _in_child(close)


def _forks_again(state: State, indices: Sequence[int]) -> Iterator[str]:
  """Reads in a child's child, then in the child."""

  def again() -> None:
    if _in_child(lambda: state.check(state.cache, indices)) == HUNG:
      raise RuntimeError("a child's child hung")
    state.check(state.cache, indices)

  yield _in_child(again)


def _many(state: State, indices: Sequence[int]) -> Iterator[str]:
  """Several children after another, of one state."""
  for _ in range(3):
    yield _in_child(lambda: state.check(state.cache, indices))


_pooled: State | None = None


def _read_pooled(index: int) -> int:
  assert _pooled is not None
  return int(_pooled.cache[index]["number"])


def _pool(state: State, indices: Sequence[int]) -> Iterator[str]:
  """Workers of `multiprocessing.Pool` read of the cache that the parent opened."""
  global _pooled
  _pooled = state
  pool = _FORK.Pool(2)
  try:
    found = pool.map_async(_read_pooled, indices).get(_WAIT_SECONDS)
  except multiprocessing.TimeoutError:
    yield HUNG
    return
  except AnystepError:
    yield REFUSED
    return
  finally:
    pool.terminate()
    pool.join()
  if found != [state.numbers[index] for index in indices]:
    raise Wrong("a worker of a pool read another example")
  yield HARMLESS


def _fetch(cache: Cache, asked: object, answers: object) -> None:
  """The loop of a worker of PyTorch's DataLoader: batches of indices come, fetched examples go."""
  while (indices := asked.get()) is not None:
    try:
      answers.put((indices, [int(example["number"]) for example in cache.__getitems__(indices)]))
    except BaseException as error:
      answers.put((indices, error))


def _data_loader(state: State, indices: Sequence[int]) -> Iterator[str]:
  """PyTorch's DataLoader where it is installed, else workers as it forks them, two at a time."""
  try:
    from torch.utils.data import DataLoader
  except ImportError:
    yield from _data_loader_s_workers(state, indices)
    return
  numbers = [
    int(example["number"])
    for batch in DataLoader(state.cache, batch_size=2, num_workers=2, sampler=list(indices), collate_fn=list)
    for example in batch
  ]
  if numbers != [state.numbers[index] for index in indices]:
    raise Wrong("a worker of PyTorch's DataLoader read another example")
  yield HARMLESS


def _data_loader_s_workers(state: State, indices: Sequence[int]) -> Iterator[str]:
  import queue

  asked, answers = [_FORK.Queue() for _ in range(2)], _FORK.Queue()
  workers = [_FORK.Process(target=_fetch, args=(state.cache, own, answers), daemon=True) for own in asked]
  try:
    for worker in workers:
      worker.start()
    batches = [list(indices[k : k + 2]) for k in range(0, len(indices), 2)]
    for k, batch in enumerate(batches):
      asked[k % 2].put(batch)
    for _ in batches:
      try:
        batch, found = answers.get(timeout=_WAIT_SECONDS)
      except queue.Empty:
        crashed = [worker.exitcode for worker in workers if worker.exitcode]
        if crashed:
          raise RuntimeError(f"a worker ended with {crashed[0]}") from None
        yield HUNG
        return
      if isinstance(found, AnystepError):
        yield REFUSED
      elif isinstance(found, BaseException):
        raise found
      elif found != [state.numbers[index] for index in batch]:
        raise Wrong("a worker as of PyTorch's DataLoader read another example")
  finally:
    for worker in workers:
      worker.kill()
      worker.join()
  yield HARMLESS


CHILDREN: dict[str, Callable[[State, Sequence[int]], Iterator[str]]] = {
  "reads its own": _reads_its_own,
  "reads the parent's": _reads_the_parents,
  "takes the parent's": _takes_the_parents,
  "closes the parent's": _closes_the_parents,
  "forks again": _forks_again,
  "many": _many,
  "pool": _pool,
  "data loader": _data_loader,
}
