"""`anystep-convert`: what it prints, refuses and leaves behind."""

import contextlib
import io
import os
import subprocess
import sys

import numpy as np
import pytest
from t5x_cases import FIXTURES

from anystep.errors import AnystepError
from anystep.train import convert
from anystep.train.conversion import formats
from anystep.train.leaves import orbax_trees

SOURCE = FIXTURES / "t5x" / "t5_1_1_checkpoints"
MODEL = FIXTURES / "hf_t5" / "t5_1_1"


def run(source, target, *flags):
  with contextlib.redirect_stdout(io.StringIO()) as printed:
    assert convert.main([f"--from={source}", f"--to={target}", *flags]) == 0
  return printed.getvalue()


def test_a_checkpoint_goes_to_others_and_back(tmp_path):
  steps = [(SOURCE, "ours", "anystep"), ("ours", "theirs", "t5x"), ("theirs", "again", "anystep")]
  for source, target, format_name in steps:
    printed = run(tmp_path / source, tmp_path / target, f"--format={format_name}")
    assert printed.startswith(f"{tmp_path / target}/checkpoint_20: 331 leaves of 2,435,356 bytes")
  first, last = (formats.open_checkpoint(str(path)).leaves for path in (SOURCE, tmp_path / "again"))
  assert first.keys() == last.keys()
  assert all(leaf.read_whole().tobytes() == last[name].read_whole().tobytes() for name, leaf in first.items())


def test_a_dry_run_lists_the_leaves_and_writes_nothing(tmp_path):
  printed = run(SOURCE, tmp_path / "out", "--dry_run", "--dtype=bfloat16", "--assign=state/param_states/.*=>")
  lines = printed.splitlines()
  assert "target/token_embedder/embedding: bfloat16 (384, 64)" in lines
  assert len(lines) == 66 + 1 + 1
  assert lines[-1].startswith("# would write 67 leaves of ")
  assert "(t5x, step 20)" in lines[-1]
  assert list(tmp_path.iterdir()) == []


def test_leaves_are_renamed_left_out_and_rounded(tmp_path):
  rules = r"target/decoder/layers_(\d)/(.*)=>target/decoder/block_\1/\2,state/.*=>"
  run(SOURCE, tmp_path / "out", f"--assign={rules}", "--dtype=float16", "--format=t5x")
  leaves = formats.open_checkpoint(str(tmp_path / "out")).leaves
  before = formats.open_checkpoint(str(SOURCE)).leaves
  name = "layers_2/mlp/wo/kernel"
  renamed = leaves[f"target/decoder/{name.replace('layers', 'block')}"].read_whole()
  np.testing.assert_array_equal(renamed, before[f"target/decoder/{name}"].read_whole().astype(np.float16))
  assert not any(name.startswith("state/param_states") for name in leaves)
  assert formats.open_checkpoint(str(tmp_path / "out")).step == 0


def test_hugging_faces_model_is_the_directory_itself(tmp_path):
  printed = run(SOURCE, tmp_path / "model", "--format=huggingface")
  assert printed.startswith(f"{tmp_path / 'model'}: 66 leaves")
  assert {path.name for path in (tmp_path / "model").iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize(
  ("arguments", "code", "kind"),
  [
    (["--to=out"], 64, "arguments"),
    (["--from={source}", "--to={out}", "--format=npz"], 64, "arguments"),
    (["--from={tmp}/nothing", "--to={out}"], 66, "checkpoint_missing"),
    (["--from={source}", "--to={out}", "--assign=nothing=>x"], 78, "assignment"),
    (["--from={source}", "--to={tmp}", "--format=huggingface"], 73, "output_exists"),
    (["--from={source}", "--to=gs://bucket/out"], 78, "store_unsupported"),
    (["--from={source}", "--to={out}", "--assign=target/.*=>"], 76, "checkpoint_tree"),
    (
      ["--from={source}", "--to={out}", "--assign=target/decoder/decoder_norm/(.*)=>target//\\1"],
      78,
      "assignment",
    ),
    (
      [
        "--from={source}",
        "--to={out}",
        "--assign=target/decoder/decoder_norm/scale=>target/decoder/layers_0",
      ],
      78,
      "assignment",
    ),
    (
      [
        "--from={source}",
        "--to={out}",
        "--assign=target/decoder/decoder_norm/scale=>target/a.b,target/encoder/encoder_norm/scale=>target/a/b",
      ],
      78,
      "assignment",
    ),
  ],
)
def test_what_cannot_be_is_refused_and_nothing_written(arguments, code, kind, tmp_path):
  values = {"source": SOURCE, "out": tmp_path / "out", "tmp": tmp_path}
  with pytest.raises(AnystepError) as refused:
    convert.main([argument.format(**values) for argument in arguments])
  assert (refused.value.code, refused.value.kind) == (code, kind)
  assert list(tmp_path.iterdir()) == []


def test_an_interrupted_conversion_counts_as_none_and_is_begun_anew(tmp_path, monkeypatch):
  def stop(path, handlers):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(orbax_trees, "write_checkpoint_metadata", stop)
    with pytest.raises(KeyboardInterrupt):
      run(SOURCE, tmp_path / "out")
  assert os.listdir(tmp_path / "out") == ["checkpoint_20.unfinished"]
  with pytest.raises(AnystepError, match="checkpoint_missing"):
    formats.find_checkpoints(str(tmp_path / "out"))
  run(SOURCE, tmp_path / "out")
  assert os.listdir(tmp_path / "out") == ["checkpoint_20"]


def test_two_conversions_to_one_target_exclude_each_other(tmp_path, monkeypatch):
  write = orbax_trees.write_checkpoint_metadata
  refused = []

  def meet_another(path, handlers):
    with pytest.raises(AnystepError) as error:
      run(SOURCE, tmp_path / "out", "--format=t5x")
    refused.append(error.value)
    write(path, handlers)

  monkeypatch.setattr(orbax_trees, "write_checkpoint_metadata", meet_another)
  run(SOURCE, tmp_path / "out")
  assert {(error.code, error.kind) for error in refused} == {(73, "conversion_running")}
  assert os.listdir(tmp_path / "out") == ["checkpoint_20"]
  formats.open_checkpoint(str(tmp_path / "out"))


def test_slashes_at_the_end_of_a_target_are_no_part_of_it(tmp_path):
  run(MODEL, f"{tmp_path}/model//", "--format=huggingface")
  assert os.listdir(tmp_path) == ["model"]
  assert formats.open_checkpoint(str(tmp_path / "model")).format == "huggingface"


def test_a_full_disk_is_told(tmp_path, monkeypatch):
  def fail(path, handlers):
    raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

  monkeypatch.setattr(orbax_trees, "write_checkpoint_metadata", fail)
  with pytest.raises(AnystepError) as refused:
    run(SOURCE, tmp_path / "out")
  assert (refused.value.code, refused.value.kind) == (74, "checkpoint_write")
  assert "No space left" in str(refused.value)


@pytest.mark.long
def test_the_program_starts_by_its_module_and_says_what_it_does(tmp_path):
  command = [sys.executable, "-m", "anystep.train.convert", f"--from={MODEL}", f"--to={tmp_path / 'ours'}"]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert (done.returncode, done.stderr) == (0, "")
  assert "(huggingface, step 0)" in done.stdout
  helped = subprocess.run([*command[:3], "--help"], capture_output=True, text=True, check=True).stdout
  assert "--assign 'REGEX=>NAME,…'" in helped
  assert "anystep-convert --from=" in helped


def test_formats_are_known_without_jax_and_tensorflow():
  check = (
    "import sys, anystep.train.conversion.formats; sys.exit(bool({'jax', 'tensorflow'} & set(sys.modules)))"
  )
  assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
