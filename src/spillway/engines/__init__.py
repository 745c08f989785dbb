"""The controller and the machines that it drives."""
