"""Support for processes in a job of a batch system, or in a Kubernetes pod.

`job_end` ends a reservation with its Slurm job. `no_gpu` helps users whose job has no GPU.
"""
