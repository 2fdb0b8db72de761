"""The terminal dashboard: a client of the daemon's admin API, which it knows only over HTTP."""
