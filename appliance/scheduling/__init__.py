"""Pure decisions: events in, commands out. No clock, no sockets, no torch, no randomness, no log."""
