"""Runs the code that it is told to on standard input; see machine.Child."""

from __future__ import annotations

import ast
import json
import os
import sys
from typing import Any

import reserve_gpu


def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    try:
        *body, last = ast.parse(code).body
        exec(compile(ast.Module(body, []), "<told>", "exec"), names)
        if isinstance(last, ast.Expr):
            return {"value": eval(compile(ast.Expression(last.value), "<told>", "eval"), names)}
        exec(compile(ast.Module([last], []), "<told>", "exec"), names)
    except BaseException as error:  # the answer is the error
        return {"error": type(error).__name__, "text": str(error)}
    return {}


def main() -> None:
    told, answers = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the code prints is no answer
    names: dict[str, Any] = {"reserve_gpu": reserve_gpu, "os": os, "sys": sys}
    print(json.dumps({"value": os.getpid()}), file=answers, flush=True)
    for line in told:
        print(json.dumps(run(json.loads(line), names), default=repr), file=answers, flush=True)


main()
