"""Replies of other machines, as values and as a program."""

from __future__ import annotations

from typing import Any

from reserve_gpu.commands.hosts import status_from_json
from reserve_gpu.commands.hosts.hosts_view import Hosts

NOW = 1_795_000_000.0


def reply(*states: str) -> dict[str, Any]:
    """Return the JSON of a machine whose devices have these states."""
    devices = [
        {"state": state, "index": index, "uuid": f"GPU-{index}"}
        for index, state in enumerate(states)
    ]
    return {"version": 1, "host": "box", "devices": devices}


def hosts_of(**states: tuple[str, ...]) -> Hosts:
    """Return hosts by name whose devices have these states."""
    found = {name: status_from_json.status(reply(*each)) for name, each in states.items()}
    return Hosts(found, NOW, ("lab",))


# A reserve-gpu that replies in a format of the past, after the text of a login shell.
OLDER = """#!/bin/sh
echo 'Welcome to {lab5}!'
echo '{"version": 0, "devices": []}'
"""
