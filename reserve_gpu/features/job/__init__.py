"""What it means for a reservation that its process is in a job of a batch system, or in a pod.

job_end: the end of the job is an end of the reservation. no_gpu: a job without a GPU.
"""
