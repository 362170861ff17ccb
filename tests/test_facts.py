"""What a holder says of itself: how far one more fact reaches."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.machine import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.machine import Machine

# Where a fact is added, and behind what: the record, who fills it in, the words.
FACT = {
    "model.py": ("    origin: str | None = None\n", "    mood: str | None = None\n"),
    "locks/record.py": ("        origin=this_kernel.origin(),\n", "        mood='calm',\n"),
    "render/phrases.py": (
        "    line += _part(holder)\n",
        "    line += (f', {holder.record.who.mood}',)\n",
    ),
}
SHOW = """
import json, reserve_gpu
from reserve_gpu.commands.table import NAMES, load
reserve_gpu.reserve()
seen = [reserve_gpu.status()]
if "hosts" in NAMES:
    seen.append(load("hosts.from_json.status")(json.loads(json.dumps(seen[0].to_dict()))))
shown = [[str(each), each.to_dict()] for each in seen]
print(json.dumps([reserve_gpu.__file__, *shown]))
"""


@pytest.mark.process
def test_one_more_fact_takes_three_files(machine: Machine, tmp_path: Path) -> None:
    """A new word in the record is in a holder's line, in the JSON, and on other machines."""
    package = tmp_path / "reserve_gpu"
    shutil.copytree(ROOT / "reserve_gpu", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (place, more) in FACT.items():
        text = (package / name).read_text()
        assert text.count(place) == 1, f"{name} has no single place for it any more: {place}"
        (package / name).write_text(text.replace(place, place + more))
    done = machine.python(SHOW, PYTHONPATH=str(tmp_path))
    assert not done.stderr
    file, *shown = json.loads(done.stdout)
    assert file.startswith(str(tmp_path))
    for text, fields in shown:
        assert ", calm for " in text
        assert fields["devices"][0]["holders"][0]["mood"] == "calm"
