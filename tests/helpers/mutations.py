"""Change a line of a function while a test runs: tests of whether a mistake would be seen."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def mutated(path: str, old: str, new: str) -> Iterator[None]:
    """Replace ``old`` by ``new`` in the source of a function within the block.

    Args:
        path: the function, as ``module:Class.method``.
        old: a part of its source.
        new: the part that takes its place, ``pass`` for none.
    """
    module, _, qualified = path.partition(":")
    function: Any = importlib.import_module(module)
    for name in qualified.split("."):
        function = getattr(function, name)
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source, f"{path} has no {old!r}"
    [definition] = ast.parse(source.replace(old, new)).body
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    ast.increment_lineno(definition, function.__code__.co_firstlineno - 1)
    namespace: dict[str, Any] = {}
    compiled = compile(ast.Module([definition], []), function.__code__.co_filename, "exec", dont_inherit=True)
    exec(compiled, function.__globals__, namespace)
    before, function.__code__ = function.__code__, namespace[definition.name].__code__
    try:
        yield
    finally:
        function.__code__ = before
