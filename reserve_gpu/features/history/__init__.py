"""What is reserved, used and waited for is logged.

recorder: a line. journal: when it is written. follower: of a command that this process becomes.
"""
