"""Power cuts at every point of what a process writes, by replaying its system calls."""
