"""The policies that ship: registered through the same entry points as third-party ones."""
