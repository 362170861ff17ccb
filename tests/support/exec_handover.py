"""Helpers of tests: exec_handover."""

from __future__ import annotations


# -- tmux ------------------------------------------------------------------------------------------
