# An example configuration for IPython and Jupyter: it loads %reserve_gpu at every start.
#
# One user:   copy it to ~/.ipython/profile_default/ipython_config.py, or add its line to the file
#             that is there. install.sh does that for you.
# Everybody:  copy it to /etc/ipython/ipython_config.py.

c = get_config()

# Append. An assignment would throw away what the system's own configuration loads.
c.InteractiveShellApp.extensions.append("reserve_gpu")

# Where the locks are. Every user of the machine has to use the same directory, which all of them
# can write to: a shared choice belongs into /etc/ipython/ipython_config.py.
# c.ReserveGPU.lock_directory = "/run/lock/reserve_gpu"

# How much used memory still counts as idle, where no process explains it.
# c.ReserveGPU.idle_memory = "1GiB"
