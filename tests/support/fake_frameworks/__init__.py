"""Stand-ins for frameworks, in a folder that is on the PYTHONPATH of child processes."""
