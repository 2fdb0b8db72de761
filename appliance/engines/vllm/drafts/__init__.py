"""Drafts of one engine: tokens that are guessed, and computed together with the next one."""
