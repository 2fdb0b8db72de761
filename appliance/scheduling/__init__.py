"""Pure decisions: events in, commands out. No clock, sockets, tasks, torch, randomness or logging."""
