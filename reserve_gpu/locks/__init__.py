"""Lock files, their records and holders, and the queue of waiters."""
