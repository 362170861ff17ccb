"""Stand-ins for frameworks; a child process has this folder on its PYTHONPATH."""
