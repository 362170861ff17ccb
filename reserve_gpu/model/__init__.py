"""Values, errors and parsing. No module here reads NVML or the lock directory."""
