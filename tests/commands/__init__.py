"""Tests of the commands, each in a folder of its command's name."""
