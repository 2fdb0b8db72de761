"""What prompts with sound need of an engine whose decoder attends to what an encoder made of it."""
