"""What the machine has: the names of devices, what they are and how they are used."""
