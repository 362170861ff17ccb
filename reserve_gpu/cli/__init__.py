"""The command line `reserve-gpu`."""
