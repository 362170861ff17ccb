"""Helpers of tests: hosts_cases."""

from __future__ import annotations

import time
from typing import Any

from reserve_gpu.commands.hosts import status_from_json
from reserve_gpu.commands.hosts.hosts_view import Hosts as Seen


def rows(*states: str) -> dict[str, Any]:
    devices = [
        {"state": state, "index": index, "uuid": f"GPU-{index}"}
        for index, state in enumerate(states)
    ]
    return {"version": 1, "host": "box", "devices": devices}


def seen(**answers: tuple[str, ...]) -> Seen:
    found = {name: status_from_json.status(rows(*states)) for name, states in answers.items()}
    return Seen(found, time.time(), ("lab",))


OLDER = """#!/bin/sh
echo 'Welcome to {lab5}!'
echo '{"version": 0, "devices": []}'
"""
