"""What clients send to have text made of it: forms, and files of sound."""
