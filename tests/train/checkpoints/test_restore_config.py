"""Configuration of the checkpoint that a run starts with: values that cannot be are refused."""

import pytest

from anystep.train.checkpoints import RestoreConfig


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"path": 3}, "path is a path"),
    ({"path": "a\nb"}, "without control characters"),
    ({"mode": "latest"}, "expected newest, all or step"),
    ({"mode": "step"}, "step is a whole number"),
    ({"step": 3}, "None without"),
    ({"missing": "fresh"}, "refuse or initialize"),
    ({"missing": "initialize"}, "needs an assignment_map"),
    ({"optimizer_state": 1}, "True or False"),
    ({"dtype": "int8"}, "float32, bfloat16"),
  ],
)
def test_a_configuration_that_cannot_be_is_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    RestoreConfig(**({"path": "runs/1"} | arguments))
