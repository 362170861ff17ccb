"""Commands for coding agents and other programs: `reserve-gpu why` and `reserve-gpu skill`."""
