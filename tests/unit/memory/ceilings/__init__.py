"""Tests of what measures a machine, and of the file that it goes to."""
