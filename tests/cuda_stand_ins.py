"""Stand-ins for NVIDIA's libraries, so that PyTorch's package for CUDA loads where they are not installed.

PyPI's PyTorch for Linux is linked with a dozen libraries of some gigabytes. Without a GPU none of their
functions is called, but the loader wants to find them. So each is made as a library of a few kilobytes, whose
functions fail. Only the small CUDA runtime is the real one: loading PyTorch calls it.

    python cuda_stand_ins.py    # for the environment that runs it; needs a C compiler and readelf
"""

from __future__ import annotations

import collections
import pathlib
import re
import subprocess
import sysconfig
import tempfile

# Libraries of NVIDIA's, but for the CUDA runtime and the driver's own.
_STANDS_FOR = re.compile(r"lib(?!cudart\.|cuda\.)(cu|nv|nccl)\w*\.so\.\d+\Z")
# Symbols without a version do not name their library.
_UNVERSIONED = re.compile(r"(nccl|cuFile|cusparseLt|nvshmem)\w+\Z")


def main() -> None:
  """Make the libraries that the environment's PyTorch is linked with, where it looks for them."""
  packages = pathlib.Path(sysconfig.get_path("platlib"))
  libraries = sorted((packages / "torch" / "lib").glob("*.so"))
  linked, symbols, unversioned = _read_symbols(libraries)
  folder = packages / "nvidia" / "cu13" / "lib"
  for library in sorted(linked):
    # Any one of the libraries may have the symbols without a version.
    _compile(folder / library, symbols[library], unversioned if library == max(linked) else set())
  print(f"{len(linked)} stand-ins for NVIDIA's libraries in {folder}")


def _read_symbols(
  libraries: list[pathlib.Path],
) -> tuple[set[str], dict[str, dict[str, set[str]]], set[str]]:
  """Return what some libraries need of NVIDIA's.

  Returns:
    Names of NVIDIA's libraries; symbols by library and version; symbols without a version.
  """
  linked: set[str] = set()
  symbols: dict[str, dict[str, set[str]]] = collections.defaultdict(lambda: collections.defaultdict(set))
  unversioned: set[str] = set()
  for library in libraries:
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", _readelf("--dynamic", library))
    linked |= {name for name in needed if _STANDS_FOR.match(name)}
    library_of = {}
    for line in _readelf("--version-info", library).splitlines():
      if match := re.search(r"File: (\S+)", line):
        name = match[1]
      elif match := re.search(r"Name: (\S+) ", line):
        library_of[match[1]] = name
    for symbol, version in re.findall(r" UND (\w+)(?:@(\S+))?", _readelf("--dyn-syms", library)):
      if _STANDS_FOR.match(library_of.get(version, "")):
        symbols[library_of[version]][version].add(symbol)
      elif not version and _UNVERSIONED.match(symbol):
        unversioned.add(symbol)
  return linked, symbols, unversioned


def _readelf(option: str, library: pathlib.Path) -> str:
  return subprocess.run(
    ["readelf", "--wide", option, library], capture_output=True, text=True, check=True
  ).stdout


def _compile(path: pathlib.Path, versions: dict[str, set[str]], unversioned: set[str]) -> None:
  """Compile a library whose functions return 1, which in NVIDIA's interfaces is a failure."""
  names = sorted(unversioned.union(*versions.values()))
  with tempfile.TemporaryDirectory() as folder:
    source, version_script = pathlib.Path(folder, "source.c"), pathlib.Path(folder, "versions")
    source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in names))
    version_script.write_text(
      "".join(f"{version} {{ global: {'; '.join(sorted(versions[version]))}; }};\n" for version in versions)
    )
    options = [f"-Wl,--version-script={version_script}"] if versions else []
    command = ["cc", "-w", "-fno-builtin", "-fPIC", "-shared", f"-Wl,-soname,{path.name}", *options]
    subprocess.run([*command, "-o", path, source], check=True)


if __name__ == "__main__":
  main()
