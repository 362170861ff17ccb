"""Leases, which end a reservation at a given time or when its devices are idle.

`schedule` decides when to warn the user and when to end the reservation, and `timer` acts on these
decisions. `lease_notices` contains the messages, `lease_line` displays them, and `lease_options`
defines the options for requesting a lease.
"""
