"""Acquire, keep, share, hand over and release a process's reservation."""
