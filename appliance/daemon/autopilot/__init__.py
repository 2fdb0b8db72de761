"""The autopilot: replays the end of the journal, proposes other policies, or applies them."""
