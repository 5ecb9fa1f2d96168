"""Imports of a module, read from its source."""

import ast
from collections.abc import Container


def imports_of(
  source: str,
  *,
  package: str,
  top_level_only: bool = False,
  with_types: bool = True,
  modules: Container[str] | None = None,
) -> set[str]:
  """Return the dotted names that a module of `package` imports.

  Args:
    source: text of the module.
    package: what its relative imports begin at.
    top_level_only: whether imports in functions are left out.
    with_types: whether imports that types alone need count.
    modules: names of modules, by which `from a import b` gives a.b or a; without them it gives both.
  """
  names = set()

  def visit(node: ast.AST, outside_functions: bool) -> None:
    if not with_types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
      return
    if isinstance(node, ast.Import):
      names.update(alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ""
      if node.level:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*above, *([base] if base else [])])
      inner = {f"{base}.{alias.name}" for alias in node.names}
      if modules is None:
        names.update({base, *inner})
      else:
        names.update(name if name in modules else base for name in inner)
    for child in ast.iter_child_nodes(node):
      inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
      if outside_functions and not (top_level_only and inside):
        visit(child, outside_functions)

  visit(ast.parse(source), True)
  return names
