"""Messages, tables and live displays for users.

A granted reservation usually displays nothing. So the modules below are also attributes of this
package, as in `render.notices.lost(...)`, and are imported when they are first used.
"""

from reserve_gpu.system.loader import lazy_modules

TYPE_CHECKING = False
if TYPE_CHECKING:
    from reserve_gpu.render import durations as durations
    from reserve_gpu.render import frontends as frontends
    from reserve_gpu.render import messages as messages
    from reserve_gpu.render import notices as notices
else:
    __getattr__ = lazy_modules("render", "durations", "frontends", "messages", "notices")
