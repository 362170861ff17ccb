"""A program that runs code from standard input and prints the results; see machine.Child."""

from __future__ import annotations

import ast
import json
import os
import sys
from typing import Any

import reserve_gpu


def evaluate(code: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run code, and return the value of its last expression, or the error."""
    try:
        *body, last = ast.parse(code).body
        exec(compile(ast.Module(body, []), "<sent>", "exec"), names)
        if isinstance(last, ast.Expr):
            return {"value": eval(compile(ast.Expression(last.value), "<sent>", "eval"), names)}
        exec(compile(ast.Module([last], []), "<sent>", "exec"), names)
    except BaseException as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {}


def main() -> None:
    lines, answers = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of the code is not an answer
    names: dict[str, Any] = {"reserve_gpu": reserve_gpu, "os": os, "sys": sys}
    print(json.dumps({"value": os.getpid()}), file=answers, flush=True)
    for line in lines:
        print(json.dumps(evaluate(json.loads(line), names), default=repr), file=answers, flush=True)


main()
