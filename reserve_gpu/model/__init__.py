"""Data types, errors and parsers. These modules read neither NVML nor the lock directory."""
