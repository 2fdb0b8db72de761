"""What prompts with images need of an engine."""
