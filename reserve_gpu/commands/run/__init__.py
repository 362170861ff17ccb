"""`reserve-gpu run`, and what all commands need that become another program."""
