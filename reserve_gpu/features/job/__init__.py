"""Support for processes in a batch job or a Kubernetes pod.

`job_end` ends a reservation when its Slurm job ends. `no_gpu` tells users whose job has no GPU how
to request one.
"""
