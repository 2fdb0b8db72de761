"""Commands that start serving: with a configuration, from directories, or with one model."""
