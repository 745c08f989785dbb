"""What both engines ask of torch and of the operating system that has no public name."""
