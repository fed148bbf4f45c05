"""One loop for all workers of a batch: a thread of this process, processes of this machine, and actors of a cluster."""
