# An example configuration for IPython and Jupyter that loads %reserve_gpu at every start.
#
# One user:   copy this file to ~/.ipython/profile_default/ipython_config.py, or add its line to
#             your existing file. `reserve-gpu setup` does this for you.
# All users:  copy this file to /etc/ipython/ipython_config.py.

c = get_config()

# Append the extension. An assignment would drop those of the system-wide configuration.
c.InteractiveShellApp.extensions.append("reserve_gpu")

# The lock directory. All users of the machine must use the same directory and have permission to
# write to it, so set it in /etc/ipython/ipython_config.py.
# c.ReserveGPU.lock_directory = "/run/lock/reserve_gpu"

# A GPU without compute processes is idle if at most this amount of memory is in use.
# c.ReserveGPU.idle_memory = "1GiB"
