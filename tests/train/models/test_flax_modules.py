"""A user's own modules, Linen and NNX: trained, with their collections and axes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen import partitioning as flax_partitioning
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec

from anystep.errors import AnystepError
from anystep.features.converters import DecoderConverter, EncoderDecoderConverter
from anystep.train.models.accumulation import T5XMicrobatches, WholeBatchGradients
from anystep.train.models.base import Model, MutableModel
from anystep.train.models.decoder_only import DecoderOnlyModel
from anystep.train.models.flax_modules import FlaxModel
from anystep.train.models.train_state import initialize, make_train_step
from anystep.train.network.decoder_only import DecoderConfig, DecoderWrapper
from anystep.train.partitioning import Partitioner

VOCAB, EMB = 16, 8
BATCH = {
  "decoder_input_tokens": np.array([[0, 5, 6, 7], [0, 3, 2, 0]], np.int32),
  "decoder_target_tokens": np.array([[5, 6, 7, 1], [3, 2, 1, 0]], np.int32),
  "decoder_loss_weights": np.array([[1, 1, 1, 1], [1, 1, 1, 0]], np.int32),
}


class Boxed(nn.Module):
  """Axes in boxes, batch statistics and dropout."""

  @nn.compact
  def __call__(self, decoder_input_tokens, train):
    init = nn.with_logical_partitioning(nn.initializers.normal(1.0), ("vocab", "embed"))
    x = nn.Embed(VOCAB, EMB, embedding_init=init)(decoder_input_tokens)
    x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
    x = nn.Dropout(0.5, deterministic=not train)(x)
    return nn.Dense(VOCAB)(x)


class ByCollection(nn.Module):
  """Axes in a collection, as in T5X."""

  @nn.compact
  def __call__(self, decoder_input_tokens):
    init = nn.initializers.normal(1.0)
    table = flax_partitioning.param_with_axes("table", init, (VOCAB, EMB), axes=("vocab", "embed"))
    return table[decoder_input_tokens] @ table.T


class Nnx(nnx.Module):
  """An NNX module with axes, batch statistics and dropout."""

  def __init__(self, *, rngs):
    init = nnx.with_partitioning(nnx.initializers.normal(1.0), ("vocab", "embed"))
    self.embed = nnx.Embed(VOCAB, EMB, embedding_init=init, rngs=rngs)
    self.norm = nnx.BatchNorm(EMB, momentum=0.5, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.out = nnx.Linear(EMB, VOCAB, rngs=rngs)

  def __call__(self, decoder_input_tokens, train):
    x = self.norm(self.embed(decoder_input_tokens), use_running_average=not train)
    return self.out(self.dropout(x, deterministic=not train))


class ByMode(nnx.Module):
  """An NNX module whose dropout and batch norm go by attributes, as `train` and `eval` set them."""

  def __init__(self, *, rngs):
    self.embed = nnx.Embed(VOCAB, EMB, rngs=rngs)
    self.norm = nnx.BatchNorm(EMB, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
    self.out = nnx.Linear(EMB, VOCAB, rngs=rngs)

  def __call__(self, decoder_input_tokens):
    return self.out(self.dropout(self.norm(self.embed(decoder_input_tokens))))


class Around(nn.Module):
  """A Linen module with an NNX module inside."""

  @nn.compact
  def __call__(self, decoder_input_tokens):
    return nnx.bridge.to_linen(ByMode, name="inner")(decoder_input_tokens)


class Mapped(nn.Module):
  """From an encoder's tokens; its axes come from expressions."""

  @nn.compact
  def __call__(self, encoder_input_tokens, decoder_input_tokens):
    x = nn.Embed(VOCAB, EMB, name="embed")(encoder_input_tokens).mean(axis=1, keepdims=True)
    return nn.Dense(VOCAB)(x + nn.Embed(VOCAB, EMB)(decoder_input_tokens))


@pytest.fixture(autouse=True)
def as_users_have_it():
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


def axes_of(model):
  flat = flatten_dict(model.logical_axes(), sep="/")
  return {path: tuple(spec) for path, spec in flat.items() if tuple(spec)}


@pytest.mark.parametrize(
  ("module", "expected"),
  [
    (Boxed(), {"params/Embed_0/embedding": ("vocab", "embed")}),
    (ByCollection(), {"params/table": ("vocab", "embed")}),
    (nnx.bridge.to_linen(Nnx), {"params/embed/embedding": ("vocab", "embed")}),
    (Mapped(), {}),
  ],
)
def test_logical_axes_come_from_what_flax_has(module, expected):
  model = FlaxModel(module)
  assert axes_of(model) == expected
  initial = model.initial_variables(jax.random.key(0))
  specs = jax.tree.structure(model.logical_axes(), is_leaf=lambda node: isinstance(node, PartitionSpec))
  assert specs == jax.tree.structure(initial)


def test_expressions_over_paths_come_first():
  patterns = [("params/embed/.*", ("vocab", "embed")), (".*/Dense_0/kernel", ("embed", "vocab"))]
  assert axes_of(FlaxModel(Mapped(), logical_axes_by_path=patterns)) == {
    "params/embed/embedding": ("vocab", "embed"),
    "params/Dense_0/kernel": ("embed", "vocab"),
  }
  model = FlaxModel(Boxed(), logical_axes_by_path=[(".*embedding", ("vocab", None)), (".*/bias", ("embed",))])
  assert axes_of(model)["params/Embed_0/embedding"] == ("vocab", None)


@pytest.mark.parametrize("module", [Boxed(), nnx.bridge.to_linen(Nnx)], ids=["linen", "nnx"])
def test_batch_statistics_are_carried_in_the_state(module):
  model = FlaxModel(module, optimizer_def=optax.sgd(0.1))
  assert isinstance(model, MutableModel)
  optimizer, root_key = model.optimizer_def, jax.random.key(1)
  mesh = Partitioner().mesh(8)
  make_initial, abstract = initialize(
    model, optimizer, root_key=root_key, mesh=mesh, partitioner=Partitioner()
  )
  state = make_initial()
  assert jax.tree.structure(abstract) == jax.tree.structure(state)
  (name,) = state.mutables["batch_stats"]
  before = jax.tree.map(np.asarray, state.mutables["batch_stats"][name])
  embedding = jax.tree.leaves(state.params)[0].shape
  step = make_train_step(model, optimizer, root_key=root_key)
  tables = [np.asarray(leaf) for path, leaf in flatten_dict(state.params).items() if path[-1] == "embedding"]
  losses = []
  for _ in range(20):
    state, metrics = step(state, BATCH)
    losses.append(float(metrics["loss"]))
    if len(losses) == 1:
      # Half of what they were and half of the batch's.
      mean = tables[0][BATCH["decoder_input_tokens"]].mean(axis=(0, 1))
      np.testing.assert_allclose(
        state.mutables["batch_stats"][name]["mean"], 0.5 * before["mean"] + 0.5 * mean, atol=1e-5
      )
  assert embedding
  assert np.mean(losses[-5:]) < 0.7 * losses[0]
  # Scores use the running averages, and change nothing.
  scores = [jax.jit(model.score_batch)(state.params, BATCH, state.mutables)["scores"] for _ in range(2)]
  np.testing.assert_array_equal(*scores)
  other = jax.tree.map(lambda leaf: leaf + 1.0, state.mutables)
  assert not np.allclose(model.score_batch(state.params, BATCH, other)["scores"], scores[0])


@pytest.mark.parametrize("module", [Boxed(), nnx.bridge.to_linen(Nnx)], ids=["linen", "nnx"])
def test_dropout_is_on_in_training_alone(module):
  model = FlaxModel(module)
  variables = model.initial_variables(jax.random.key(0))
  params = variables.pop("params")

  def loss(key):
    return float(model.loss_and_mutables(params, BATCH, key, variables)[0])

  assert loss(jax.random.key(1)) == loss(jax.random.key(1)) != loss(jax.random.key(2))
  assert loss(None) == loss(None)


@pytest.mark.parametrize("module", [nnx.bridge.to_linen(ByMode), Around()], ids=["alone", "inside"])
def test_nnx_modules_train_and_score_by_their_modes(module):
  model = FlaxModel(module)
  variables = model.initial_variables(jax.random.key(0))
  params = variables.pop("params")
  first, second = (
    float(model.loss_and_mutables(params, BATCH, jax.random.key(i), variables)[0]) for i in (1, 2)
  )
  assert first != second
  inner = params.get("inner", params)
  # The running averages are those of the beginning: mean 0, variance 1.
  x = inner["embed"]["embedding"][BATCH["decoder_input_tokens"]] / np.sqrt(1 + 1e-5)
  log_likelihoods = jax.nn.log_softmax(x @ inner["out"]["kernel"] + inner["out"]["bias"])
  targets = np.take_along_axis(np.asarray(log_likelihoods), BATCH["decoder_target_tokens"][..., None], -1)
  scores = (targets[..., 0] * BATCH["decoder_loss_weights"]).sum(axis=1)
  np.testing.assert_allclose(model.score_batch(params, BATCH, variables)["scores"], scores, rtol=1e-5)


def rows_of_tokens(num_rows=8):
  rng = np.random.default_rng(0)
  batch = {name: rng.integers(1, VOCAB, (num_rows, 4), np.int32) for name in BATCH}
  return batch | {"decoder_loss_weights": rng.integers(0, 3, (num_rows, 4), np.int32)}


def gradients(model, microbatches, seed=3):
  """Loss, gradients and mutable collections of the step's first update."""
  variables = model.initial_variables(jax.random.key(0))
  params = variables.pop("params")

  def compute(params, batch):
    found = microbatches.gradients(model, params, batch, jax.random.key(seed), variables)
    return found.loss, found.gradients, found.mutables

  return jax.jit(compute)(params, rows_of_tokens())


def assert_near(found, expected):
  def compare(a, b):
    assert np.linalg.norm(a - b) <= 1e-6 * max(np.linalg.norm(b), 1e-6)

  jax.tree.map(compare, found, expected)


class Dropping(nn.Module):
  """Dropout without mutable collections."""

  @nn.compact
  def __call__(self, decoder_input_tokens, train):
    x = nn.Embed(VOCAB, EMB)(decoder_input_tokens)
    return nn.Dense(VOCAB)(nn.Dropout(0.5, deterministic=not train)(x))


@pytest.mark.parametrize(
  ("module", "rows_per_key"),
  [(Dropping(), None), (Dropping(), 2), (Boxed(), 2), (nnx.bridge.to_linen(Nnx), 2)],
  ids=["key by row", "key by two rows", "batch statistics", "nnx"],
)
def test_masks_and_statistics_depend_on_no_number_of_microbatches(module, rows_per_key):
  factor = "NUM_REAL_TARGET_TOKENS"
  model = FlaxModel(module, loss_normalizing_factor=factor, rows_per_key=rows_per_key)
  whole = gradients(model, WholeBatchGradients())
  for num_microbatches in (2, 4):
    assert_near(gradients(model, WholeBatchGradients(num_microbatches=num_microbatches)), whole)
  # The masks matter, and so do the groups of rows that draw one.
  others = (
    gradients(model, WholeBatchGradients(), seed=4),
    gradients(FlaxModel(module, loss_normalizing_factor=factor, rows_per_key=4), WholeBatchGradients()),
  )
  for other in others:
    assert abs(float(other[0] / whole[0]) - 1) > 1e-4


def test_each_group_of_rows_draws_masks_of_its_own():
  model, batch = FlaxModel(Dropping(), rows_per_key=2), rows_of_tokens()
  batch = {name: np.tile(array[:1], (8, 1)) for name, array in batch.items()}
  params = model.initial_variables(jax.random.key(0))["params"]
  keys = jax.random.split(jax.random.key(1), 8)
  logits = np.asarray(model.logits(params, batch, keys))
  groups = {logits[start : start + 2].tobytes() for start in range(0, 8, 2)}
  assert len(groups) == 4
  np.testing.assert_allclose(
    model.logits(params, jax.tree.map(lambda a: a[2:4], batch), keys[2:4]), logits[2:4]
  )


def test_statistics_of_the_whole_batch_allow_no_microbatches_but_t5xs():
  model = FlaxModel(Boxed())
  with pytest.raises(AnystepError) as refused:
    gradients(model, WholeBatchGradients(num_microbatches=2))
  assert refused.value.kind == "num_microbatches"
  assert refused.value.fields["expected"] == "1, since the model computes all 8 rows together"
  table = model.initial_variables(jax.random.key(0))["params"]["Embed_0"]["embedding"]
  first, second = np.asarray(table)[rows_of_tokens()["decoder_input_tokens"]].reshape(2, -1, EMB).mean(axis=1)
  for microbatches, expected in (
    (WholeBatchGradients(), 0.5 * (first + second) / 2),
    # T5X hands them from one microbatch to the next.
    (T5XMicrobatches(num_microbatches=2), 0.5 * (0.5 * first) + 0.5 * second),
  ):
    after = gradients(model, microbatches)[2]["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(after, expected, atol=1e-6)


@pytest.mark.parametrize(
  ("rows_per_key", "microbatches", "expected"),
  [
    (0, WholeBatchGradients(), "a whole number of at least 1, or None"),
    (True, WholeBatchGradients(), "a whole number of at least 1, or None"),
    (3, WholeBatchGradients(), "a divisor of the 8 rows that are computed at once"),
    (8, T5XMicrobatches(num_microbatches=2), "a divisor of the 4 rows that are computed at once"),
  ],
)
def test_groups_that_do_not_divide_the_rows_are_refused(rows_per_key, microbatches, expected):
  with pytest.raises(AnystepError) as refused:
    microbatches.check(FlaxModel(Dropping(), rows_per_key=rows_per_key), 8)
  assert refused.value.kind == "rows_per_key"
  assert refused.value.fields["expected"] == expected


def test_the_converter_follows_from_the_features_that_a_module_names():
  assert isinstance(FlaxModel(Boxed()).feature_converter, DecoderConverter)
  assert isinstance(FlaxModel(Mapped()).feature_converter, EncoderDecoderConverter)
  own = DecoderConverter(loss_on_targets_only=False)
  assert FlaxModel(Boxed(), feature_converter=own).feature_converter is own


@pytest.mark.parametrize(
  ("options", "error", "message"),
  [
    ({"module": None}, ValueError, "expected a Linen module, got None"),
    ({"input_shapes": 3}, ValueError, "expected shapes by feature, got 3"),
    (
      {"logical_axes_by_path": 5},
      AnystepError,
      "kind=parameter_pattern expected=.logical_axes_by_path as a list",
    ),
    ({"logical_axes_by_path": [("(", ("embed",))]}, AnystepError, "kind=parameter_pattern .* unterminated"),
    ({"logical_axes_by_path": [(".*", "embed")]}, AnystepError, "kind=parameter_pattern .* got=.*embed"),
    (
      {"input_shapes": {"decoder_tokens": (1, 4)}},
      ValueError,
      "among decoder_input_tokens, train; got decoder_to",
    ),
    (
      {"input_shapes": {"decoder_input_tokens": 4}},
      ValueError,
      "expected shapes, as .*; got decoder_input_tokens: 4",
    ),
  ],
)
def test_a_model_that_cannot_be_is_refused(options, error, message):
  with pytest.raises(error, match=message):
    FlaxModel(**{"module": Boxed(), **options})


def test_an_expression_that_matches_no_variable_is_refused():
  model = FlaxModel(Mapped(), logical_axes_by_path=[("params/embd/.*", ("vocab", "embed"))])
  with pytest.raises(AnystepError) as refused:
    model.logical_axes()
  assert refused.value.kind == "parameter_pattern"
  assert "params/embed/embedding" in refused.value.fields["nearest"]


class Pair(nn.Module):
  """Returns no logits."""

  def __call__(self, decoder_input_tokens):
    return decoder_input_tokens, decoder_input_tokens


def test_the_number_of_token_ids_is_that_of_the_logits():
  assert [FlaxModel(module).vocab_size for module in (Boxed(), nnx.bridge.to_linen(Nnx))] == [VOCAB, VOCAB]
  with pytest.raises(AnystepError) as refused:
    FlaxModel(Pair()).vocab_size  # noqa: B018
  assert (refused.value.kind, refused.value.fields["module"]) == ("module", "Pair")
  assert refused.value.fields["expected"] == "that it returns logits, (rows, length, vocab_size)"


def test_a_feature_that_a_batch_lacks_is_named():
  model = FlaxModel(Mapped())
  params = model.initial_variables(jax.random.key(0))["params"]
  with pytest.raises(AnystepError) as refused:
    model.loss_fn(params, BATCH)
  assert (refused.value.kind, refused.value.fields["got"]) == ("module", "encoder_input_tokens")


class Bare(nn.Module):
  """Logits without parameters."""

  def __call__(self, decoder_input_tokens):
    return jax.nn.one_hot(decoder_input_tokens, VOCAB)


def test_a_module_without_parameters_is_refused():
  with pytest.raises(AnystepError) as refused:
    FlaxModel(Bare()).initial_variables(jax.random.key(0))
  assert (refused.value.kind, refused.value.fields["got"]) == ("module", "none")


def test_as_many_axes_are_named_as_a_variable_has():
  model = FlaxModel(Mapped(), logical_axes_by_path=[("params/.*/kernel", ("embed", "mlp", "kv"))])
  with pytest.raises(AnystepError) as refused:
    model.logical_axes()
  assert refused.value.kind == "module"
  assert refused.value.fields["variable"] == "params/Dense_0/kernel"
  assert refused.value.fields["shape"] == (EMB, VOCAB)


def test_models_without_mutable_collections_follow_the_protocol_too():
  config = DecoderConfig(vocab_size=VOCAB, emb_dim=EMB, num_heads=1, head_dim=8, mlp_dim=8, num_layers=1)
  model = DecoderOnlyModel(DecoderWrapper(config))
  assert isinstance(model, Model)
  assert not isinstance(model, MutableModel)
  assert jnp.isfinite(model.loss_fn(model.initial_variables(jax.random.key(0))["params"], BATCH)[0])
