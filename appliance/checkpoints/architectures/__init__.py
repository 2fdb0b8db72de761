"""What is particular to some architectures: what their files must say, and what layers keep."""
