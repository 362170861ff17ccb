"""Query NVML, match device names, and set CUDA's environment variables."""
