"""How policies are found, stacked, guarded and validated. Those that ship are in `plugins`."""
