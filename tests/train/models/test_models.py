"""What a model reports about a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from anystep.errors import AnystepError
from anystep.train.models.decoder_only import DecoderOnlyModel
from anystep.train.models.encoder_decoder import EncoderDecoderModel
from anystep.train.models.train_state import TrainState, make_train_step
from anystep.train.network.decoder_only import DecoderConfig, DecoderWrapper
from anystep.train.network.scalable_t5 import ScalableT5Config, ScalableTransformer
from anystep.train.network.t5 import T5Config, Transformer
from anystep.train.optimizers import adafactor, learning_rate_schedule

MODULE = Transformer(
  T5Config(
    vocab_size=32, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32, num_encoder_layers=1, num_decoder_layers=1
  )
)
BATCH = {
  "encoder_input_tokens": np.array([[5, 6, 7, 1], [4, 3, 1, 0]], np.int32),
  "decoder_input_tokens": np.array([[0, 11, 12, 13], [0, 14, 0, 0]], np.int32),
  "decoder_target_tokens": np.array([[11, 12, 13, 1], [14, 1, 0, 0]], np.int32),
  "decoder_loss_weights": np.array([[1, 1, 1, 1], [1, 1, 0, 0]], np.int32),
}


@pytest.fixture(autouse=True)
def strict_jax():
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    yield


def initial_params(seed):
  return EncoderDecoderModel(MODULE).initial_variables(jax.random.key(seed))["params"]


@pytest.fixture(scope="module")
def params():
  return initial_params(0)


def loss_and_metrics(model, params, batch=BATCH):
  return jax.jit(model.loss_fn)(params, batch)


def scored(model, params, batch=BATCH):
  return jax.jit(model.score_batch)(params, batch)


def test_scores_are_log_likelihoods(params):
  model = EncoderDecoderModel(MODULE, z_loss=0.1, label_smoothing=0.1)
  scores = scored(model, params)
  loss, metrics = loss_and_metrics(EncoderDecoderModel(MODULE, z_loss=0.0), params)
  assert float(jnp.sum(scores["scores"])) == pytest.approx(-float(loss), rel=1e-5)
  np.testing.assert_allclose(jnp.sum(scores["token_scores"], axis=1), scores["scores"], rtol=1e-6)
  assert np.all(np.asarray(scores["token_scores"])[BATCH["decoder_loss_weights"] == 0] == 0)
  assert np.all(np.asarray(scores["token_scores"])[BATCH["decoder_loss_weights"] == 1] < 0)
  assert scores["predictions"].dtype == jnp.int32
  hits = (scores["predictions"] == BATCH["decoder_target_tokens"]) & (BATCH["decoder_loss_weights"] > 0)
  assert int(metrics["correct"]) == int(np.sum(hits))


def test_correct_counts_targets_with_the_highest_logit(params):
  model = EncoderDecoderModel(MODULE)
  predictions = scored(model, params)["predictions"]
  # The mask knows only which targets are padding: these may change without changing a logit.
  easy = np.where(BATCH["decoder_target_tokens"] > 0, np.maximum(predictions, 1), 0)
  _, metrics = loss_and_metrics(model, params, BATCH | {"decoder_target_tokens": easy})
  assert float(metrics["correct"]) == float(metrics["weight_sum"]) == 6.0


@pytest.mark.parametrize("weights", [[[3, 3, 3, 3], [3, 3, 0, 0]], [[0.5, 1, -1, 0], [2, 0.25, 0, 0]]])
def test_scores_are_multiplied_by_the_weights(params, weights):
  model = EncoderDecoderModel(MODULE)
  plain = scored(model, params, BATCH | {"decoder_loss_weights": np.ones((2, 4), np.int32)})["token_scores"]
  found = scored(model, params, BATCH | {"decoder_loss_weights": np.array(weights, np.float32)})
  np.testing.assert_allclose(found["token_scores"], plain * np.array(weights, np.float32), rtol=1e-6)
  np.testing.assert_allclose(found["scores"], jnp.sum(found["token_scores"], axis=1), rtol=1e-6)


def test_z_loss_is_reported_as_part_of_the_loss(params):
  with_z, metrics = loss_and_metrics(EncoderDecoderModel(MODULE, z_loss=0.1), params)
  without_z, _ = loss_and_metrics(EncoderDecoderModel(MODULE, z_loss=0.0), params)
  assert float(metrics["z_loss"]) == pytest.approx(float(with_z - without_z), rel=1e-4)
  assert metrics["loss"] == with_z


@pytest.mark.parametrize(
  ("factor", "divisor"), [(None, 1), (2.0, 2), ("NUM_REAL_TARGET_TOKENS", 6), ("NUM_TOTAL_TARGET_TOKENS", 8)]
)
def test_the_factor_divides_the_loss_but_not_the_metrics(params, factor, divisor):
  plain, plain_metrics = loss_and_metrics(EncoderDecoderModel(MODULE), params)
  loss, metrics = loss_and_metrics(EncoderDecoderModel(MODULE, loss_normalizing_factor=factor), params)
  assert float(loss) == pytest.approx(float(plain) / divisor, rel=1e-6)
  assert metrics == plain_metrics


def test_an_average_per_sequence_counts_rows_alike(params):
  model = EncoderDecoderModel(MODULE, z_loss=0.0, loss_normalizing_factor="AVERAGE_PER_SEQUENCE")
  loss, _ = loss_and_metrics(model, params)
  scores = scored(model, params)["scores"]
  assert float(loss) == pytest.approx(-float(scores[0] / 4 + scores[1] / 2) / 2, rel=1e-5)


def test_an_average_per_sequence_counts_packed_examples_alike(params):
  model = EncoderDecoderModel(MODULE, loss_normalizing_factor="AVERAGE_PER_SEQUENCE")
  packed = {
    "encoder_input_tokens": np.array([[5, 6, 7, 1, 4, 3, 1]], np.int32),
    "encoder_segment_ids": np.array([[1, 1, 1, 1, 2, 2, 2]], np.int32),
    "decoder_input_tokens": np.array([[0, 11, 12, 13, 0, 14]], np.int32),
    "decoder_target_tokens": np.array([[11, 12, 13, 1, 14, 1]], np.int32),
    "decoder_segment_ids": np.array([[1, 1, 1, 1, 2, 2]], np.int32),
    "decoder_loss_weights": np.ones((1, 6), np.int32),
  }
  together, _ = loss_and_metrics(model, params, packed)
  apart, _ = loss_and_metrics(model, params)
  assert float(together) == pytest.approx(float(apart), rel=1e-5)


def test_initial_parameters_are_a_function_of_the_key_alone():
  first, again, other = initial_params(3), initial_params(3), initial_params(4)
  jax.tree.map(np.testing.assert_array_equal, first, again)
  kernels = [params["decoder"]["logits_dense"]["kernel"] for params in (first, other)]
  assert np.any(kernels[0] != kernels[1])


def test_a_batch_without_a_feature_is_refused(params):
  batch = {name: array for name, array in BATCH.items() if name != "decoder_loss_weights"}
  with pytest.raises(ValueError, match=r"\['decoder_loss_weights'\] missing"):
    EncoderDecoderModel(MODULE).loss_fn(params, batch)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"label_smoothing": 1.0}, r"label_smoothing: expected a rate in \[0, 1\), got 1.0"),
    ({"loss_normalizing_factor": "NUM_TOKENS"}, "one of NUM_REAL_TARGET_TOKENS, .* got 'NUM_TOKENS'"),
    ({"loss_normalizing_factor": 0}, "expected a number to divide by, got 0"),
    ({"loss_normalizing_factor": -1.0}, "expected a number to divide by, got -1.0"),
    ({"loss_normalizing_factor": True}, "expected a number to divide by, got True"),
    ({"label_smoothing": None}, r"label_smoothing: expected a rate in \[0, 1\), got None"),
    ({"z_loss": -1e-4}, "z_loss: expected a number of at least 0, got -0.0001"),
    ({"z_loss": "0.1"}, "z_loss: expected a number of at least 0, got '0.1'"),
    ({"module": None}, "module: expected a network with its config, got None"),
    ({"module": Transformer(None)}, "module: expected a network with its config"),
  ],
)
def test_a_model_that_cannot_be_is_refused(options, message):
  with pytest.raises(ValueError, match=message):
    EncoderDecoderModel(**{"module": MODULE, **options})


def test_an_optimizer_that_was_not_called_is_refused():
  with pytest.raises(AnystepError) as refused:
    EncoderDecoderModel(MODULE, optimizer_def=optax.adamw)
  assert refused.value.kind == "optimizer"


@pytest.mark.parametrize(
  ("optimizer", "kind", "text"),
  [
    (optax.lbfgs(), "optimizer", "value_fn"),
    (optax.sgd("0.1"), "optimizer", "TypeError"),
    (optax.sgd(optax.warmup_cosine_decay_schedule), "optimizer", "peak_value"),
    (adafactor(learning_rate_schedule), "learning_rate", "write @learning_rates.learning_rate_schedule()"),
  ],
)
def test_an_optimizer_that_cannot_compute_updates_is_refused(params, optimizer, kind, text):
  step = make_train_step(EncoderDecoderModel(MODULE), optimizer, root_key=jax.random.key(0))
  state = jax.eval_shape(lambda: TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params)))
  with pytest.raises(AnystepError) as refused:
    step.eval_shape(state, BATCH)
  assert refused.value.kind == kind
  assert text in str(refused.value)


class WithoutSums(EncoderDecoderModel):
  """A model of one's own whose loss comes without the sums for reports."""

  def loss_fn(self, params, batch, rng=None):
    loss, metrics = super().loss_fn(params, batch, rng)
    return loss, {"loss": metrics["loss"]}


def test_a_model_whose_loss_has_no_sums_for_reports_is_refused(params):
  optimizer = optax.sgd(0.1)
  step = make_train_step(WithoutSums(MODULE), optimizer, root_key=jax.random.key(0))
  state = jax.eval_shape(lambda: TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params)))
  with pytest.raises(AnystepError) as refused:
    step.eval_shape(state, BATCH)
  assert (refused.value.kind, refused.value.fields["module"]) == ("module", "WithoutSums")
  assert refused.value.fields["got"] == "no z_loss, weight_sum, correct, num_targets"


@pytest.mark.parametrize(
  ("model", "module", "message"),
  [
    (DecoderOnlyModel, MODULE, "without encoder_input_tokens, got Transformer"),
    (
      EncoderDecoderModel,
      DecoderWrapper(DecoderConfig(vocab_size=8)),
      "with encoder_input_tokens, got Decod",
    ),
    (
      EncoderDecoderModel,
      Transformer(ScalableT5Config(vocab_size=8)),
      "expected a T5Config, got a ScalableT5",
    ),
    (
      EncoderDecoderModel,
      ScalableTransformer(T5Config(vocab_size=8)),
      "expected a ScalableT5Config, got a T5C",
    ),
  ],
)
def test_a_network_of_another_model_or_with_another_config_is_refused(model, module, message):
  with pytest.raises(ValueError, match=message):
    model(module)
