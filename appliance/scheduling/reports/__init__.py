"""What the machine's books say of the whole box, for those that ask from outside."""
