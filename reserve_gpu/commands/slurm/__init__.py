"""`kernel install --slurm`: a kernel in a job of Slurm's.

Client - relay (here) - srun - node (there) - kernel. srun's standard streams carry the messages, so
that no port is opened, and the job ends with them. The client and the relay meet at the sockets of
sockets.py; socket_owners.py tells whose TCP connections reach them.
"""
