"""Documentation that is generated: manual pages, the sample configuration, metrics, hooks."""
