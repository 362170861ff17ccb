"""Kernels in Slurm jobs, installed by `kernel install --slurm`.

Messages between the Jupyter client and the kernel pass through the relay (on the client's machine),
srun, and the node program (in the job). They use srun's standard streams, so no port is opened in
the job, and the job ends when these streams are closed. The `sockets` module connects the client to
the relay, and `socket_owners` identifies the user at the other end of a TCP connection.
"""
