"""Python for a subprocess: as if the packages named as %(heavy)r were not installed; after `import sys`."""

WITHOUT = """
  class Without:
    def __init__(self, finder):
      self.finder = finder

    def __getattr__(self, name):
      return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
      return None if name.partition(".")[0] in %(heavy)r else self.finder.find_spec(name, path, target)

  sys.meta_path[:] = map(Without, sys.meta_path)
"""
