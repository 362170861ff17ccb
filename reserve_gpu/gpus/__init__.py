"""The machine's GPUs: NVML readings, device names, and CUDA's environment variables."""
