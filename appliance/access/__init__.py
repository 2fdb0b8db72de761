"""Who may do how much: API keys, rate limits, fair turns, admission."""
