"""Kernels in Slurm jobs, installed by `kernel install --slurm`.

Messages pass from the Jupyter client through the relay (on the client's machine), srun and the node
program (in the job) to the kernel, and back. They use the standard streams of srun, so no port is
opened in the job, and the job ends with these streams. The module `sockets` connects the client to
the relay, and `socket_owners` identifies the user at the other end of a TCP connection.
"""
