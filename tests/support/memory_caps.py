"""Helpers of tests: memory_caps."""

from __future__ import annotations
