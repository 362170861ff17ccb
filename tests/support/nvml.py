"""Lines of scenarios for drivers that lack newer versions of process queries."""

from __future__ import annotations

QUERIES = [f"nvmlDeviceGet{kind}RunningProcesses" for kind in ("Compute", "Graphics", "MPSCompute")]
NO_V3 = "".join(f"missing {query}_v3\n" for query in QUERIES)
NO_V2 = "".join(f"missing {query}_v2\n" for query in QUERIES)
