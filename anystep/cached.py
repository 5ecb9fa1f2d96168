"""A property that is computed once for each object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

_T = TypeVar("_T")


class cached_property(Generic[_T]):
  """`functools.cached_property` as it is from Python 3.12 on.

  In 3.11 all objects of a class share one lock while a value is computed. A process forked at that time
  would find the lock taken for ever. Here there is no lock: two threads may compute at once, and the first
  result stays.
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
    # Later look-ups find it there: an object's own attributes come before a property without __set__.
    return instance.__dict__.setdefault(self._name, self._compute(instance))
