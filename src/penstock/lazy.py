"""An attribute that is worked out when it is first asked for.

As `functools.cached_property`, but without the lock that it holds in Python 3.11 for all objects
of a class at once: a thread that works out the attribute of one object would make every thread
wait that asks another. Two threads may both work out the attribute of one object; one of the
results is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801 (used as a decorator, like property)
    def __init__(self, work: Callable[[Any], T]) -> None:
        self._work = work
        self.__doc__ = work.__doc__

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> lazy[T]: ...

    @overload
    def __get__(self, instance: object, owner: type[Any]) -> T: ...

    def __get__(self, instance: object | None, owner: type[Any]) -> lazy[T] | T:
        if instance is None:
            return self
        # From now on the attribute itself is found, and this is not asked again.
        found: T = instance.__dict__.setdefault(self._name, self._work(instance))
        return found
