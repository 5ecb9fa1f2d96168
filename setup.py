"""Packaging: the folders stand side by side here and are one package, anystep, where installed."""

from pathlib import Path

from setuptools import find_packages, setup

# The light library: plans, orders and caches, without TensorFlow, Beam, JAX or SeqIO.
LIBRARY = [
  "absl-py>=2.1",
  "array-record>=0.8.1",
  "etils[epath]>=1.9",
  "google-crc32c>=1.6",
  "ml_dtypes>=0.5",
  "numba>=0.61",
  "numpy>=2.0",
  "protobuf>=5",
  "rich>=13",
  "zstandard>=0.22",
]
# sentencepiece 0.2.3 needs a protobuf that TensorFlow 2.21 refuses.
TASKS = [
  "editdistance>=0.8",
  "pyarrow>=19",
  "sentencepiece<=0.2.2",
  "seqio>=0.0.20,<0.0.21",
  "tensorflow>=2.19",
]
CACHE = [*TASKS, "apache-beam>=2.65"]
TRAIN = [
  *TASKS,
  "clu>=0.0.12",
  "flax>=0.10",
  "gin-config>=0.5",
  "jax>=0.6",
  "optax>=0.2.4",
  "orbax-checkpoint>=0.11",
  "sacrebleu>=2.3",
  "tensorboard>=2.18",
  "tensorstore>=0.1.70",
]
# Tokenizers and datasets of the Hugging Face hub.
HUGGINGFACE = ["datasets>=3", "tokenizers>=0.20"]
# Object stores; botocore and google-cloud-storage find credentials as the platforms' own tools do.
STORES = ["botocore>=1.35", "google-cloud-storage>=3.1", "obstore>=0.8"]
TORCH = ["torch>=2.4"]
DEV = [
  "flask>=3",
  "flask-cors>=5",
  "grain>=0.2.10",
  "hypothesis>=6",
  "moto[s3]>=5.1",
  "mypy>=1.15",
  "pytest>=8",
  "pytest-xdist>=3",
  "ruff>=0.9",
  "setuptools>=77",
  "uv>=0.5",
]

PACKAGE_FOLDERS = {
  "anystep": "anystep",
  "anystep.tasks": "tasks",
  "anystep.cache_job": "cache_job",
  "anystep.train": "train",
  "anystep.gin_configs": "gin_configs",
}

setup(
  name="anystep",
  version="0.1.0",
  description="Deterministic data and training for sequence models",
  long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
  long_description_content_type="text/markdown",
  license="Apache-2.0",
  python_requires=">=3.11",
  packages=[
    name
    for package, folder in PACKAGE_FOLDERS.items()
    for name in (package, *(f"{package}.{inner}" for inner in find_packages(folder)))
  ],
  package_dir=PACKAGE_FOLDERS,
  package_data={"anystep": ["py.typed"], "anystep.gin_configs": ["**/*.gin"]},
  install_requires=LIBRARY,
  extras_require={
    "cache": CACHE,
    "train": TRAIN,
    "huggingface": HUGGINGFACE,
    "stores": STORES,
    "torch": TORCH,
    "all": sorted({*CACHE, *TRAIN, *HUGGINGFACE, *STORES}),
    "dev": sorted({*CACHE, *TRAIN, *HUGGINGFACE, *STORES, *DEV}),
    # What users bring, for tests: the lock leaves out what it would put over SeqIO (pyproject.toml).
    "t5": ["t5==0.9.4"],
    # For `make test-torch`, which runs in an environment of its own.
    "dev-torch": [*TORCH, "pillow", "pytest>=8", "torchdata>=0.11", "torchtitan>=0.3"],
  },
  entry_points={
    "console_scripts": [
      "anystep-cache = anystep.cache_job.main:run",
      "anystep-convert = anystep.train.convert:run",
      "anystep-data = anystep.tasks.data_program.main:run",
      "anystep-train = anystep.train.main:run",
      "anystep-vocab = anystep.tasks.vocab_program.main:run",
    ]
  },
)
