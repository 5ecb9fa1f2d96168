"""A property that is computed once for each object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

_T = TypeVar("_T")


class cached_property(Generic[_T]):
  """`functools.cached_property` as it is from Python 3.12 on.

  In 3.11 all objects of a class share a lock while one of them is computing, which a forked process finds
  taken for ever where another thread of its parent held it. Here two threads may compute at once; what the
  first one found stays.
  """

  def __init__(self, compute: Callable[[Any], _T]):
    self._compute = compute
    self.__doc__ = compute.__doc__

  def __set_name__(self, owner: type, name: str) -> None:
    self._name = name

  @overload
  def __get__(self, instance: None, owner: type) -> cached_property[_T]: ...

  @overload
  def __get__(self, instance: object, owner: type) -> _T: ...

  def __get__(self, instance: object | None, owner: type) -> cached_property[_T] | _T:
    if instance is None:
      return self
    # Found there from now on: a property without __set__ comes after the object's own attributes.
    return instance.__dict__.setdefault(self._name, self._compute(instance))
