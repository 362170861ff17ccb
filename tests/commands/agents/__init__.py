"""Tests of what programs read and type."""
