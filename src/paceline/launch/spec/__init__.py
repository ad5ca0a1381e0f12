"""What is to be launched, settled before anything starts."""
