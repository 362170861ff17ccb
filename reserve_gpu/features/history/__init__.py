"""Log reservations, the use of their devices, and waits in the user's history.

`recorder` logs one reservation, `journal` logs the reservations and waits of this process, and
`command_log` logs for a command that replaces this process by exec.
"""
