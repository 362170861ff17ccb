"""What programs that ask for a GPU read and type: `run --json`, `why` and `skill`."""
