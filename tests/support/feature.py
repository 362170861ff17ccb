"""Helpers of tests: feature."""

from __future__ import annotations
