"""Worker processes, one for each rank of an instance, and their frames to and from the daemon."""
