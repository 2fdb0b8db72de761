"""Pure decisions: events in, commands out. No clock, no socket, no torch, no randomness, no log."""
